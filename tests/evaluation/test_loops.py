"""Loops and what went before them, on hand-made logs whose answer is known."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvkeep.core.errors import ConfigError
from kvkeep.evaluation.loops import FEATURES, lead, looped, start_of
from kvkeep.evaluation.loops_summary import SHOWN, loops_findings
from kvkeep.evaluation.records import Run, SampleRecord
from kvkeep.evaluation.statistics.problem_means import problem_means
from tests.evaluation.runs import header, sample


def text(
    id: str, *, tokens: int = 200, start: int | None = None, period: int = 5, finish: str = "length",
    **extra: Any,
) -> SampleRecord:  # fmt: skip
    """A wrong answer with a loop from ``start`` on."""
    facts = {"finish": finish, "loop_start": start, "tail_period": None if start is None else period, **extra}
    return sample(id, 0, False, tokens=tokens, extra=facts)


def eviction(at: int, **changes: float) -> dict[str, float]:
    return {"at": at, "entries": 10, **dict.fromkeys(FEATURES, 0.5), **changes}


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (text("a", start=100), True),
        (text("a", start=184), True),
        (text("a", start=185), False),  # fifteen tokens
        (text("a", start=100, finish="stop"), False),
        (text("a"), False),
        (sample("a", 0, False, failure_class="phrase_loop"), True),
        (sample("a", 0, False, extra={"finish": "length", "tail_period": 8}), True),  # an older log
        (sample("a", 0, False, extra={"finish": "length", "tail_period": 7}), False),
        (sample("a", 0, False), False),
    ],
)
def test_what_is_a_loop(one: SampleRecord, expected: bool) -> None:
    """A digit that stands three times at the end must not count, nor a text that ended by itself."""
    assert looped(one) is expected
    assert problem_means([one], "loop").means.tolist() == [float(expected)]
    known = one.extra.get("loop_start")
    assert start_of(one) == (known if expected else None)


@pytest.mark.parametrize("seed", range(10))
def test_the_last_evictions_before_a_loop(seed: int) -> None:
    """Against a loop over tokens; evictions from the start on cannot have caused it."""
    rng = random.Random(seed)
    times = sorted(rng.sample(range(1, 150), 12))
    start, count = rng.randrange(times[0] + 1, 150), rng.randrange(1, 4)
    found = lead(text("a", start=start, evicted=[eviction(at) for at in times]), count)
    known = [at for at in times if at < start]
    assert found is not None
    assert [one["at"] for one in (*found.earlier, *found.before)] == known
    assert [one["at"] for one in found.before] == known[-count:]
    assert found.gap == start - known[-1]
    gaps = []
    for token in range(known[0] + 1, start + 1):
        back = 1
        while token - back not in known:
            back += 1
        gaps.append(back)
    assert found.chance == pytest.approx(sum(gaps) / len(gaps))


def test_without_a_cause_there_is_no_lead() -> None:
    """No log, no eviction before it, or one that took nothing."""
    assert lead(text("a", start=50), 2) is None
    assert lead(text("a", start=50, evicted=[eviction(50)]), 2) is None
    assert lead(text("a", start=50, evicted=[eviction(20, entries=0)]), 2) is None
    assert lead(text("a", evicted=[eviction(20)]), 2) is None


def arm(name: str, samples: list[SampleRecord], **changes: Any) -> Run:
    facts = {"run": name, "problems": len(samples), "draws": 1, "seeds": (0,), **changes}
    return Run(header=header(**facts), samples=tuple(samples))


def planted() -> dict[str, Run]:
    """Twenty texts; under ``large`` twelve of them loop after evictions of large ranges."""
    quiet = [text(f"q{number}", evicted=[eviction(at) for at in range(20, 200, 20)]) for number in range(20)]
    loud = [
        text(
            f"q{number}",
            start=105,
            evicted=[eviction(at, range=0.9 if at in (80, 100) else 0.6) for at in range(20, 200, 20)],
        )
        if number < 12
        else quiet[number]
        for number in range(20)
    ]
    return {"quiet": arm("quiet", quiet), "large": arm("large", loud)}


def test_findings_tell_what_was_planted() -> None:
    """Shares, differences, starts, and what went before and earlier."""
    found = loops_findings(planted())
    assert found["beside"] == "quiet"
    quiet, large = found["arms"]["quiet"], found["arms"]["large"]
    assert quiet["loops"] | {"interval": None} == {"count": 0, "share": 0, "interval": None}
    assert quiet["loops"]["interval"][0] == 0
    assert large["loops"]["share"] == 0.6
    low, high = large["loops"]["interval"]
    assert 0.3 < low < 0.6 < high < 0.8
    assert large["difference"]["estimate"] == pytest.approx(0.6)
    assert large["difference"]["p"] < 0.01
    assert (large["difference"]["more"], large["difference"]["fewer"]) == (12, 0)
    assert large["starts"] == [105] * 12
    begun = dict(zip(found["grid"], large["begun"], strict=True))
    assert begun[100] == 0
    assert begun[105] == begun[200] == 0.6
    went = large["evicted"]
    assert went["texts"] == 12
    assert went["before"]["range"]["value"] == pytest.approx(0.9)
    assert went["earlier"]["range"]["value"] == pytest.approx(0.6)
    assert went["change"]["range"]["value"] == pytest.approx(0.3)
    assert went["change"]["range"]["problems"] == 12
    assert went["rest"]["range"]["value"] == pytest.approx(0.5)
    assert went["gap"]["value"] == 5
    assert went["lines"]["range"] == [None] * (SHOWN - 5) + [0.6, 0.6, 0.6, 0.9, 0.9]
    assert quiet["evicted"]["texts"] == 0
    assert quiet["evicted"]["before"]["range"] is None
    assert len(found["loops"]) == 12
    assert found["loops"][0]["before"]["range"] == pytest.approx(0.9)


def test_runs_that_prove_nothing_are_not_compared() -> None:
    """Another sampling, or other problems: shares stand, differences do not."""
    runs = planted()
    other = arm("other", list(runs["large"].samples), sampling={"preset": "greedy"})
    fewer = arm("fewer", list(runs["large"].samples[:5]))
    found = loops_findings({**runs, "other": other, "fewer": fewer}, beside="quiet")["arms"]
    assert found["other"]["difference"] is None
    assert found["other"]["reasons"][0].startswith("sampling")
    assert not any("--allow" in reason for reason in found["other"]["reasons"])  # it has no such option
    assert "15 samples" in found["fewer"]["reasons"][-1]
    assert found["fewer"]["loops"]["share"] == 1


@pytest.mark.parametrize(
    ("runs", "beside", "message"),
    [
        ({}, None, "no run"),
        ({"one": Run(header=header(), samples=())}, None, "no sample"),
        ({"one": arm("one", [text("a")])}, "two", "choose from"),
    ],
)
def test_mistakes_are_explained(runs: dict[str, Run], beside: str | None, message: str) -> None:
    """Before anything is averaged."""
    with pytest.raises(ConfigError, match=message):
        loops_findings(runs, beside=beside)
