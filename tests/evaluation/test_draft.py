"""A plan drawn up from dev runs is the plan that the same runs on held-out problems carry out."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml

import kvkeep
from kvkeep.core.errors import ConfigError, EvidenceError
from kvkeep.evaluation.draft import draft, held_out
from kvkeep.evaluation.identity import plain
from kvkeep.evaluation.records import Run
from kvkeep.evaluation.seal import load
from kvkeep.evaluation.splits import ids_sha256
from kvkeep.evaluation.study import locate
from tests.evaluation.runs import names
from tests.evaluation.scripted import Sums
from tests.evaluation.studies import study_run

IDS = names("confirm", 40)
CONFIRM = {
    "sums": {
        "name": "sums",
        "version": "1",
        "sha256": "a" * 64,
        "part": "confirm",
        "ids_sha256": ids_sha256(IDS),
        "problems": 40,
        "grader": "exact",
        "grader_version": "1",
    }
}


def dev(arm: str, budget: int, text: str, **changes: Any) -> Run:
    amount = kvkeep.Budget(entries=budget, prompt="kept")
    policy = kvkeep.policy(text, budget=amount, buffer=8)
    run = study_run(arm, budget, 2, "", split="dev", preregistration=None, **changes)
    facts: dict[str, Any] = {
        "policy": policy.name,
        "policy_options": plain(policy.options()),
        "budget": {"entries": budget, "prompt": "kept"},
    }
    return dataclasses.replace(run, header=dataclasses.replace(run.header, **facts))


def pairs(challenger: str = "tova") -> list[tuple[Run, Run]]:
    return [(dev("baseline", size, "random"), dev("challenger", size + 1, challenger)) for size in (32, 64)]


def write(runs: list[tuple[Run, Run]], **changes: Any) -> dict[str, Any]:
    return draft("s", "Does it?", runs, changes.get("held_out", CONFIRM), hypothesis="It does.")


@pytest.mark.parametrize(
    "text", ["tova", "vase-dkv(rank=8) + sample + reserve(slots=4)", "vase-attnv(reserve=8)"]
)
def test_the_same_runs_on_held_out_problems_fit_in(text: str, tmp_path: Path) -> None:
    """Hashes and options typed by hand are wrong in one place of fifty."""
    runs = pairs(text)
    path = tmp_path / "s.yaml"
    path.write_text(yaml.safe_dump(write(runs), sort_keys=False))
    study = load(path)
    assert study.tasks[0].problems == 40
    assert [cell.name for cell in study.cells] == ["sums/tiny/32-33", "sums/tiny/64-65"]
    ids = {"split": "confirm", "problems": 40, "ids_sha256": ids_sha256(IDS)}
    for cell, pair in zip(study.cells, runs, strict=True):
        for arm, run in zip(("baseline", "challenger"), pair, strict=True):
            place, reasons = locate(study, dataclasses.replace(run.header, **ids))
            assert reasons == []
            assert place == [(cell, arm)]


def test_the_metric_is_that_of_the_task() -> None:
    """A plan that tests whole problems where the dev runs were judged by parts tests another question."""
    graded = [
        tuple(
            dataclasses.replace(run, header=dataclasses.replace(run.header, extra={"metric": "score"}))
            for run in pair
        )
        for pair in pairs()
    ]
    assert write(pairs())["analysis"]["metric"] == "accuracy"
    assert write(graded)["analysis"]["metric"] == "score"  # type: ignore[arg-type]
    with pytest.raises(EvidenceError, match="one family has one metric"):
        write([pairs()[0], graded[1]])  # type: ignore[list-item]


def test_the_calibration_is_planned_too(tmp_path: Path) -> None:
    """Statistics measured anew after the plan are another policy under the same name."""
    read = {"calibration_sha256": "d" * 64}
    runs = [(dev("baseline", 32, "random"), dev("challenger", 32, "tova", **read))]
    path = tmp_path / "s.yaml"
    path.write_text(yaml.safe_dump(write(runs), sort_keys=False))
    assert load(path).cells[0].calibration_sha256 == "d" * 64
    with pytest.raises(EvidenceError, match="two calibrations"):
        write([(dev("baseline", 32, "random", calibration_sha256="e" * 64), runs[0][1])])


def test_the_gates_are_planned_too(tmp_path: Path) -> None:
    """Gates trained anew after the plan are another policy under the same name; each arm may have its own."""
    read = dev("challenger", 32, "tova", gates_sha256="d" * 64)
    path = tmp_path / "s.yaml"
    path.write_text(yaml.safe_dump(write([(dev("baseline", 32, "random"), read)])))
    study = load(path)
    assert study.cells[0].gates_sha256 == {"challenger": "d" * 64}
    ids = {"split": "confirm", "problems": 40, "ids_sha256": ids_sha256(IDS)}
    for gates, fits in (("d" * 64, True), ("e" * 64, False), (None, False)):
        header = dataclasses.replace(read.header, **ids, gates_sha256=gates)
        assert (locate(study, header)[1] == []) == fits


def test_arms_of_unlike_widths_are_matched_by_bytes(tmp_path: Path) -> None:
    """Budgets that were matched by bytes must be judged by bytes when the study is confirmed."""
    few = {"bits": 4, "protect": "policy", "group": 16, "reserve": None, "sinks": 4, "recent": None}
    runs = [(dev("baseline", 32, "random"), dev("challenger", 50, "tova", precision=few))]
    path = tmp_path / "s.yaml"
    path.write_text(yaml.safe_dump(write(runs)))
    study = load(path)
    assert study.memory.match == "mean_memory"
    assert study.arms.challenger is not None
    assert study.arms.challenger.precision == few
    assert "memory" not in write(pairs())


def test_runs_that_make_no_study_are_refused() -> None:
    """A plan from confirm runs would be written after the results."""
    seen = [
        (dataclasses.replace(one, header=dataclasses.replace(one.header, split="confirm")), other)
        for one, other in pairs()
    ]
    with pytest.raises(EvidenceError, match="drafted from dev runs"):
        write(seen)
    with pytest.raises(EvidenceError, match="the challenger is not the same policy"):
        write([pairs()[0], pairs("keydiff")[1]])
    with pytest.raises(EvidenceError, match="seeds is"):
        write([(dev("baseline", 32, "random", seeds=(1, 2, 3)), pairs()[0][1])])
    with pytest.raises(ConfigError, match="at least one pair"):
        write([])
    with pytest.raises(ConfigError, match="nothing was given to confirm"):
        write(pairs(), held_out={})


def test_a_task_says_what_it_holds_out() -> None:
    """Hashes of other problems than those that are run would let no run in, or the wrong ones."""
    task = Sums(20)
    plan = held_out(task, 5)
    assert plan["ids_sha256"] == ids_sha256(problem.id for problem in task.problems("confirm", 5))
    assert (plan["name"], plan["part"], plan["problems"], plan["sha256"]) == ("sums", "confirm", 5, "f" * 64)
    with pytest.raises(ConfigError, match="holds no problem out"):
        held_out(Sums(0))


def test_another_set_can_confirm(tmp_path: Path) -> None:
    """Thirty problems are too few to be parted: one year is tuned on, the next confirms."""
    path = tmp_path / "s.yaml"
    later = {**CONFIRM["sums"], "name": "later-sums", "sha256": "e" * 64}
    path.write_text(yaml.safe_dump(write(pairs(), held_out={"sums": later}), sort_keys=False))
    study = load(path)
    assert [task.name for task in study.tasks] == ["later-sums"]
    assert [cell.name for cell in study.cells] == ["later-sums/tiny/32-33", "later-sums/tiny/64-65"]
