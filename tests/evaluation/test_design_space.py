"""The design space: its mechanisms, its stages, and the six ways to be wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

import kvkeep
from kvkeep.cli import options
from kvkeep.core.budget import Budget
from kvkeep.core.errors import ConfigError, EvidenceError, UnknownNameError, UnsupportedError
from kvkeep.core.precision import Precision
from kvkeep.evaluation.comparison import Comparison, measure
from kvkeep.evaluation.design_space.diagnostics import Evidence, diagnose
from kvkeep.evaluation.design_space.mechanisms import (
    FAMILIES,
    MECHANISMS,
    Arm,
    Mechanism,
    chosen,
    precision_flags,
)
from kvkeep.evaluation.design_space.proxy import Nats, change, nats
from kvkeep.evaluation.design_space.result import screening, whole
from kvkeep.evaluation.design_space.stages import Settings, Stages
from kvkeep.evaluation.identity import plain
from kvkeep.evaluation.preregistration import Preregistration
from kvkeep.evaluation.records import Run
from kvkeep.evaluation.report.design_space_tables import diagnostics_table, gains_table, reasons
from kvkeep.evaluation.runner import Plan
from kvkeep.evaluation.sampling import Sampling
from kvkeep.evaluation.seal import load_frozen, lock_path
from kvkeep.evaluation.splits import hash_order
from kvkeep.evaluation.statistics.decision import decide
from kvkeep.evaluation.study import admit
from kvkeep.evaluation.tasks.registry import make_task
from tests.evaluation.runs import names, run

DEV, CONFIRM = (hash_order(names(part, 120)) for part in ("dev", "confirm"))


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda each: each.name)
@pytest.mark.parametrize("base", ["snapkv(window=8)", "vase-attnv", "key-norm"])
def test_every_mechanism_is_a_switch_of_existing_parts(mechanism: Mechanism, base: str) -> None:
    """A mechanism that only the study knows could not be used by anybody."""
    arm = mechanism.arm(base, Budget(entries=256), buffer=8)
    plain_policy = kvkeep.policy(base, budget=256, buffer=8)
    settings = Sampling(**arm.sampling)
    changed = arm.policy != plain_policy or settings != Sampling()
    assert changed
    assert mechanism.switch
    assert (arm.policy.amount.entries == 256) == (arm.precision is None)
    other = arm.with_entries(200)
    assert other.policy.amount.entries == 200
    assert (other.sampling, other.precision) == (arm.sampling, arm.precision)


def test_few_bits_get_the_bits_of_the_base() -> None:
    """By the name of the width in the screening, by what they really take where bytes are matched."""
    budget = Budget(entries=90, prompt="kept")
    (mechanism,) = chosen(["second-chance"])
    arm = mechanism.arm("snapkv(window=16)", budget, buffer=16)
    assert mechanism.switch == "--kv-bits 4 --protect policy --kv-group 16 --kv-prompt full"

    def size(entries: int, weight: float) -> float:  # a quarter, the newest 16 and 4 sinks are in full
        full = entries // 4 + 16 + 4
        return full + (entries - full) * weight

    for entries, weight in (
        (arm.policy.amount.count, 4 / 16),
        (arm.with_entries(90).weighing().policy.amount.count, 6 / 16),
    ):
        assert size(entries, weight) <= 90 < size(entries + 1, weight)
    counted = mechanism.arm("snapkv(window=16)", Budget(entries=90), buffer=16)
    assert counted.precision == replace(arm.precision, prompt="few")  # type: ignore[type-var]
    assert Arm(policy=arm.policy).weighing() == Arm(policy=arm.policy)


def test_reading_says_nothing_of_a_policy_that_keeps_every_prompt() -> None:
    """It would be refused only after hours of screening and matching: a text that is read is all prompt."""
    budget = Budget(entries=64, prompt="kept")
    for text in ("raas", "raas + recency"):
        arm = Arm(policy=kvkeep.policy(text, budget=budget, buffer=8))
        assert nats(None, None, None, arm) is None  # type: ignore[arg-type]  # nothing is read
    with pytest.raises(AttributeError):  # where it says something, the texts are asked for
        nats(None, None, None, Arm(policy=kvkeep.policy("snapkv(window=8)", budget=budget)))  # type: ignore[arg-type]


def test_all_five_families_are_there() -> None:
    """The paper's catalogue has five, and none may be left out in silence."""
    assert {each.family for each in MECHANISMS} == set(FAMILIES)


def test_mechanisms_are_chosen_by_name() -> None:
    """A typo must not study something else."""
    assert chosen() == MECHANISMS
    assert [each.name for each in chosen(["recency", "pyramid"])] == ["recency", "pyramid"]
    with pytest.raises(UnknownNameError, match="recency"):
        chosen(["recencies"])
    with pytest.raises(ConfigError, match="once"):
        chosen(["recency", "recency"])


@dataclass
class Task:
    """What sealing asks of a task."""

    name: str = "sums"
    version: str = "1"

    def problems(self, part: str, limit: int | None) -> list[Any]:
        return [type("Problem", (), {"id": id}) for id in {"dev": DEV, "confirm": CONFIRM}[part][:limit]]

    def fingerprint(self) -> str:
        return "a" * 64

    def grader_facts(self) -> dict[str, str]:
        return {"name": "exact", "version": "1"}


@dataclass
class Bench:
    """Answers from a rule instead of a model: ``solves`` says how many of ten, by arm, model and part."""

    solves: dict[tuple[str, str, str], int]
    extra_entries: int = 8
    log: list[str] = field(default_factory=list)
    out: Path | None = None

    def task(self) -> Any:
        return Task()

    def run(self, arm: Arm, model: str, out: Path, plan: Plan, study: Preregistration | None = None) -> Run:
        name = "period" if arm.policy.buffer == 32 else "hot" if arm.sampling else arm.policy.name
        name = "few" if arm.precision is not None else name
        ids = {"dev": DEV, "confirm": CONFIRM}[plan.part][: plan.limit]
        if plan.part == "confirm":
            assert self.out is not None
            assert lock_path(self.out / "study.yaml").exists(), "a held-out problem was touched too early"
        self.log.append(f"{plan.part} {model} {name} {arm.policy.amount.entries}")
        entries = arm.policy.amount.count
        held = 20.0 + entries + (self.extra_entries if name == "period" else 0)
        tenths = self.solves.get((name, model, plan.part), 5)
        solved = {id: [place % 10 < tenths] for place, id in enumerate(ids)}
        made = run(
            solved,
            mean_cache=held,
            precision=None if arm.precision is None else arm.precision.as_dict(),
            run=out.name,
            policy=arm.policy.name,
            policy_options=plain(arm.policy.options()),
            budget={"entries": entries, "prompt": "counts"},
            model=model,
            model_sha256=("a" if model == "one" else "b") * 64,
            task_sha256="a" * 64,
            prompt_sha256="c" * 64,
            split=plan.part,
            sampling=Sampling(preset="x", temperature=0.6, **arm.sampling).as_dict(),
        )
        samples = made.samples
        if arm.precision is not None:
            full = arm.precision.settled(buffer=arm.policy.buffer, budget=entries).full
            memory = 20.0 + full + (entries - full) * arm.precision.weight
            samples = tuple(replace(each, mean_memory=memory, prefill_memory=20.0) for each in samples)
        return Run(header=admit(made.header, study), samples=samples)

    def nats(self, arm: Arm, model: str) -> Nats | None:
        if arm.sampling:
            return None
        better = 0.1 if arm.policy.buffer == 32 else 0.0
        return Nats(
            per_token=tuple((1.0 - better + 0.01 * (text % 3),) * 40 for text in range(20)),
            starts=(arm.policy.buffer,) * 20,
        )


PERIOD = Mechanism(name="period", family="cadence", does="evict rarely", options={"buffer": 32})
HOT = Mechanism(name="hot", family="decoding", does="draw warmer", sampling={"repetition_rise": 0.5})


FEW = Mechanism(
    name="few",
    family="state",
    does="what would have gone lives on",
    precision=Precision(bits=4, protect="policy", group=16),
)


SETTINGS: dict[str, Any] = {
    "base": "snapkv(window=8)",
    "options": {"buffer": 8},
    "entries": 80,
    "prompt": "counts",
    "models": ("one", "two"),
    "mechanisms": (PERIOD, HOT),
    "problems": 110,
}


def stages(out: Path, bench: Bench, mechanisms: Sequence[Mechanism] = (PERIOD, HOT)) -> Stages:
    """The study of two mechanisms on two made-up models."""
    bench.out = out
    return Stages(Settings(**SETTINGS | {"mechanisms": mechanisms}), bench, out)


def test_a_gain_that_memory_bought_evaporates(tmp_path: Path) -> None:
    """The heart of the study: more cache at the same request looks like progress until it is matched."""
    bench = Bench({("period", "one", "dev"): 7, ("period", "one", "confirm"): 5})
    found = whole(stages(tmp_path, bench))
    period, hot = found.rows
    assert period.promising
    assert period.screening.difference.estimate == pytest.approx(0.2)
    assert period.screening.cache_ratio == pytest.approx(108 / 100)
    assert period.evidence is not None
    assert period.evidence.verdict == "undecided"
    assert {cell.cell for cell, _ in period.evidence.confirmed.values()} == {
        "sums/one/80-72/period",
        "sums/two/80-72/period",
    }
    for _, comparison in period.evidence.confirmed.values():
        assert comparison.cache_ratio == pytest.approx(1.0)
    assert found.evaporated == ("period",)
    assert not hot.promising
    present = {each.name for each in period.findings if each.present}
    assert present == {"proxy-to-runtime drift", "budget overshoot"}
    assert {each.name for each in hot.findings if each.present is None} == {"proxy-to-runtime drift"}
    table = gains_table(found)
    assert [row[0] for row in table.rows] == ["period", "hot"]
    assert table.rows[0][-1] == "undecided: evaporates"
    assert all(len(row) == len(table.columns) for row in table.rows)
    assert len(diagnostics_table(found).rows) == 2
    assert any("budget overshoot" in line for line in reasons(found))


def test_few_bits_are_matched_and_sealed_by_their_bytes(tmp_path: Path) -> None:
    """More entries in as many bytes is the mechanism; more bytes would be memory that is not paid for."""
    bench = Bench({("few", "one", "dev"): 7, ("few", "one", "confirm"): 7})
    found = whole(stages(tmp_path, bench, (FEW, HOT)))
    few = found.rows[0]
    # 80 entries in 16 bits: 163 by the name of the width, 136 with their scales.
    assert "dev one few 163" in bench.log
    assert "confirm one few 136" in bench.log
    assert few.screening.memory_ratio > 1.1
    assert few.evidence is not None
    assert few.evidence.verdict == "better"
    for _, comparison in few.evidence.confirmed.values():
        assert comparison.memory_ratio == pytest.approx(1.0, abs=0.01)
        assert comparison.cache_ratio == pytest.approx(156 / 100)
    assert "budget overshoot" in {each.name for each in few.findings if each.present}
    study = load_frozen(tmp_path / "study.yaml")
    assert study.memory.match == "mean_memory"
    assert FEW.precision is not None
    assert study.arms.challengers["few"].precision == FEW.precision.as_dict()
    assert study.arms.challengers["hot"].precision is None
    note = gains_table(found).note
    assert "For few an equal budget is as many bits by the name of the width" in note
    # Another precision than the sealed one is no part of the study.
    finer = replace(FEW, precision=Precision(bits=2, protect="policy", group=16))
    arm = finer.arm("snapkv(window=8)", Budget(entries=80), buffer=8).with_entries(136)
    plan = Plan(part="confirm", limit=110)
    with pytest.raises(EvidenceError, match=r"precision is .*'bits': 2.* was registered as .*'bits': 4"):
        bench.run(arm, "one", tmp_path / "other", plan, study)


@dataclass
class Failing(Bench):
    """Cannot run one arm at one number of entries."""

    at: tuple[str, int] = ("", 0)

    def run(self, arm: Arm, model: str, out: Path, plan: Plan, study: Preregistration | None = None) -> Run:
        if ("period" if arm.policy.buffer == 32 else "", arm.policy.amount.count) == self.at:
            raise ConfigError("out of room")
        return super().run(arm, model, out, plan, study)


def test_a_run_that_fails_while_matching_is_no_near_miss(tmp_path: Path) -> None:
    """The screening's budget would pass for the nearest one, and its gain for one of equal memory."""
    bench = Failing({("period", "one", "dev"): 7}, at=("period", 72))
    with pytest.raises(ConfigError, match="out of room"):
        whole(stages(tmp_path, bench))
    assert "dev one period 80" in bench.log
    assert not (tmp_path / "study.yaml").exists()


def test_the_plan_is_sealed_and_a_second_call_keeps_it(tmp_path: Path) -> None:
    """Held-out problems are touched under a frozen plan, and that plan does not move."""
    bench = Bench({("period", "one", "confirm"): 9, ("period", "two", "confirm"): 9})
    found = whole(stages(tmp_path, bench))
    assert found.family is not None
    assert found.rows[0].evidence is not None
    assert found.rows[0].evidence.verdict == "better"
    study = load_frozen(tmp_path / "study.yaml")
    assert study.sha256 == found.family.preregistration
    assert study.arms.challengers["hot"].sampling is not None
    assert study.arms.challengers["period"].sampling is None
    again = whole(stages(tmp_path, Bench(bench.solves)))
    assert again.family is not None
    assert again.family.preregistration == study.sha256
    other = stages(tmp_path, Bench(bench.solves), (PERIOD,))
    with pytest.raises(EvidenceError, match="its mechanisms are hot, period, and period were asked for"):
        whole(other)
    assert not other.bench.log  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"screened": 0}, "screened 0 is below 1"),
        ({"tolerance": -1}, "tolerance -1 is outside"),
        ({"tolerance": 0}, "tolerance 0 is outside"),  # stopped in matching, after the screening
        ({"base": "quest"}, "quest keeps everything"),
        ({"base": "snapkv(window=8) + merge", "mechanisms": chosen(["cam"])}, "merges evicted values twice"),
        ({"base": "snapkv(window=80)"}, "leaves nothing of a budget"),
        ({"base": "snapkv(window=8) + whole-model", "mechanisms": (FEW,)}, "of all layers together"),
    ],
)
def test_what_cannot_be_studied_is_said_before_anything_runs(changed: dict[str, Any], message: str) -> None:
    """A baseline of hours, and then a mechanism that cannot be built."""
    with pytest.raises((ConfigError, UnsupportedError), match=message):
        Settings(**SETTINGS | changed)


def test_a_screening_alone_touches_nothing_else(tmp_path: Path) -> None:
    """``--screen-only`` is for a first look: one model, dev problems, no plan."""
    bench = Bench({})
    found = screening(stages(tmp_path, bench))
    assert all(line.startswith("dev one ") for line in bench.log)
    assert len(bench.log) == 3
    assert found.family is None
    assert found.evaporated == ()
    assert gains_table(found).rows[0][-1] == "dropped"
    assert not (tmp_path / "study.yaml").exists()


def comparison(
    base: int, new: int, count: int = 110, *, ratio: float = 1.0, first: int | None = None, unread: int = 0
) -> Comparison:
    """Tenths solved by each side; ``first`` of ten on the first 50 problems alone."""
    ids = DEV[:count]
    rule = {id: (first if first is not None and place < 50 else new) for place, id in enumerate(ids)}
    solved = {id: [place % 10 < rule[id]] for place, id in enumerate(ids)}
    one = run({id: [place % 10 < base] for place, id in enumerate(ids)})
    other = run(solved, mean_cache=100 * ratio)
    if unread:
        samples = tuple(
            each
            if place % 10 >= unread
            else replace(each, correct=False, score=0.0, answer_class="not_extracted")
            for place, each in enumerate(other.samples)
        )
        other = Run(header=other.header, samples=samples)
    return measure(one, other, metric="accuracy", resamples=1000)


def evidence(
    confirmed: dict[str, Comparison], *, nats: tuple[float, tuple[float, float]] | None = None, **parts: Any
) -> Evidence:
    """Evidence in which only what is given is out of the ordinary."""
    decision = decide({model: each.difference for model, each in confirmed.items()})
    cells = {cell.cell: cell for cell in decision.cells}
    return Evidence(
        screening=parts.get("screening", comparison(5, 5, 50)),
        dev={"one": parts.get("dev", comparison(5, 5))},
        confirmed={model: (cells[model], each) for model, each in confirmed.items()},
        nats=nats,
    )


SAME = {"one": comparison(5, 5), "two": comparison(5, 5)}


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        (
            "iso-cache underperformance",
            evidence(SAME, screening=comparison(5, 7, 50, ratio=1.1), dev=comparison(5, 5)),
            evidence(SAME, screening=comparison(5, 7, 50), dev=comparison(5, 7)),
        ),
        (
            "n-evaporation",
            evidence(SAME, dev=comparison(5, 5, first=7)),
            evidence(SAME, dev=comparison(5, 7)),
        ),
        (
            "proxy-to-runtime drift",
            evidence(SAME, nats=(-0.1, (-0.2, -0.05))),
            evidence({"one": comparison(5, 9)}, nats=(-0.1, (-0.2, -0.05))),
        ),
        (
            "budget overshoot",
            evidence(SAME, screening=comparison(5, 7, 50, ratio=1.03)),
            evidence(SAME, screening=comparison(5, 7, 50, ratio=1.01)),
        ),
        (
            "extraction collapse",
            evidence({"one": comparison(5, 5, unread=2)}),
            evidence({"one": comparison(5, 2)}),
        ),
        (
            "one model only",
            evidence({"one": comparison(5, 9), "two": comparison(5, 4)}),
            evidence({"one": comparison(5, 9), "two": comparison(5, 6)}),
        ),
    ],
)
def test_each_way_to_be_wrong_is_seen_and_not_imagined(name: str, wrong: Evidence, right: Evidence) -> None:
    """A diagnostic that never fires, or always does, would say nothing."""
    found = [{each.name: each.present for each in diagnose(one)} for one in (wrong, right)]
    assert [each[name] for each in found] == [True, False]


def test_worse_on_one_model_outweighs_better_on_another() -> None:
    """No mechanism is recommended that harms a model."""
    assert evidence({"one": comparison(5, 9), "two": comparison(5, 1)}).verdict == "worse"
    assert evidence({"one": comparison(5, 9), "two": comparison(5, 5)}).verdict == "better"


def test_change_of_the_internal_number_is_paired() -> None:
    """Texts differ more than policies do: the interval is one of differences."""
    one = Nats(per_token=((1.0,), (5.0,), (9.0,), (3.0,)), starts=(0, 0, 0, 1))
    other = Nats(per_token=((0.9,), (4.9,), (8.9,), (1.0,)), starts=(0, 0, 0, 0))
    found = change((one, other))
    assert found is not None
    estimate, (low, high) = found
    assert estimate == pytest.approx(-0.1)
    assert (low, high) == pytest.approx((-0.1, -0.1))


def test_change_compares_the_same_tokens() -> None:
    """Evicting every 128 tokens counts from token 128 on: answers get harder, and it would look worse."""
    harder = tuple(float(place) for place in range(100))
    often, rarely = (Nats(per_token=(harder, harder), starts=(start,) * 2) for start in (16, 64))
    for pair in ((often, rarely), (rarely, often)):
        assert change(pair) == (0.0, (0.0, 0.0))


def test_texts_without_an_answer_to_read_change_nothing() -> None:
    """The study would end with an error of the random source after its last run."""
    short = Nats(per_token=((1.0, 2.0), (1.0, 2.0)), starts=(128, 128))
    assert change((short, short)) is None


def test_a_task_without_training_texts_is_studied_without_the_internal_number() -> None:
    """It stopped after hours of screening and matching, before the plan was sealed."""
    arm = Arm(policy=kvkeep.policy("snapkv(window=8)", budget=64, buffer=8))
    assert nats(None, None, make_task("needle(count=4)"), arm) is None  # type: ignore[arg-type]


def test_nats_come_back_from_their_file() -> None:
    """What was read is not read again; what an earlier version noted, one number a text, is."""
    found = Nats(per_token=((0.5, 0.25), (1.0, 2.0)), starts=(0, 1))
    assert Nats.from_json(found.as_json()) == found
    assert Nats.from_json("[0.5, NaN]") is None


@pytest.mark.parametrize(
    "precision",
    [
        Precision(bits=4),
        Precision(bits=2, key_bits=4),
        Precision(bits=2, protect="recent", group=16, reserve=0, sinks=2, recent=8),
        Precision(bits=8, protect="policy", prompt="full"),
    ],
)
def test_a_precision_comes_back_from_its_flags(precision: Precision) -> None:
    """A header would name a command that stores in another way."""
    words = " ".join(precision_flags(precision)).split()
    given = dict(zip(words[::2], words[1::2], strict=True))

    def number(flag: str) -> int | None:
        return int(given[flag]) if flag in given else None

    numbers = (number(f"--kv-{name}") for name in ("group", "reserve", "sinks", "recent"))
    bits, protect, prompt = number("--kv-bits"), given.get("--protect"), given.get("--kv-prompt")
    keys = number("--kv-key-bits")
    assert options.make_precision(bits, protect, *numbers, prompt, keys) == precision
