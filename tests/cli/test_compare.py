"""Comparison, study and power from the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from kvkeep.evaluation.records import Run
from kvkeep.evaluation.runlog import RunLog
from kvkeep.evaluation.seal import freeze
from tests.evaluation import runs as made
from tests.evaluation.studies import plan, study_run, write


def save(folder: Path, run: Run) -> Path:
    """Write a run as `kvkeep eval` does."""
    place = folder / run.header.run
    with RunLog(place, run.header) as log:
        for sample in run.samples:
            log.append(sample)
    return place


def dev_run(folder: Path, name: str, share: int, **changes: float) -> Path:
    ids = made.names("dev", 70)
    solved = {id: [place % share == 0] * 2 for place, id in enumerate(ids)}
    return save(folder, made.run(solved, run=name, **changes))


def test_compares_logs(run: Callable[..., Result], tmp_path: Path) -> None:
    """The everyday command: two folders in, a table and a sentence out."""
    base, new = dev_run(tmp_path, "base", 4), dev_run(tmp_path, "new", 2)
    shown = run("compare", base, new, "--resamples", 500)
    assert shown.exit_code == 0, shown.output
    text = " ".join(shown.output.split())
    assert "Branch A: 1 of 1 cells better" in text
    assert "70 problems; p by bootstrap, 500 resamples" in text
    assert "it does not confirm" in text
    facts = json.loads(run("compare", base, new, "--resamples", 500, "--json").output)
    assert facts["decision"]["branch"] == "A"
    assert facts["comparisons"]["new"]["difference"]["estimate"] == pytest.approx(17 / 70)


def test_refusals_reach_the_user(run: Callable[..., Result], tmp_path: Path) -> None:
    """An unfair comparison must end in its reasons, not in a number."""
    base, new = dev_run(tmp_path, "base", 4), dev_run(tmp_path, "new", 2, mean_cache=150.0)
    refused = run("compare", base, new)
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "+50.0 %" in refused.stderr
    allowed = run("compare", base, new, "--allow", "cache", "--resamples", 500)
    assert "differences in cache were allowed" in " ".join(allowed.output.split())
    for flags, message in (
        (["--confirm"], "needs both"),
        (["--test", "t"], "use bootstrap or sign-flip"),
        (["--match-on", "peak"], "use mean_cache or prefill_cache"),
        (["--metric", "tokens"], "use accuracy or score"),
    ):
        wrong = run("compare", base, new, *flags)
        assert wrong.exit_code == 2
        assert message in wrong.stderr
    assert "baseline first" in run("compare", base).stderr


def test_a_study_is_frozen_and_confirmed(run: Callable[..., Result], tmp_path: Path) -> None:
    """From plan to decision with four commands."""
    path = write(tmp_path, plan())
    assert "not frozen yet" in run("study", "check", path).output
    sealed = freeze(path)
    assert sealed in run("study", "freeze", path).output
    assert json.loads(run("study", "check", path, "--json").output)["frozen"]
    places = [
        save(tmp_path, study_run(arm, budget, share, sealed))
        for arm, budget, share in (
            ("baseline", 32, 4),
            ("challenger", 32, 1),
            ("baseline", 64, 2),
            ("challenger", 64, 2),
        )
    ]
    shown = run("compare", *places, "--confirm", "--prereg", path)
    assert "What follows: claim it." in " ".join(shown.output.split()), shown.output
    assert "No deviations." in shown.output
    assert "--confirm and a frozen pre-registration" in run("compare", *places).stderr
    path.write_text(path.read_text().replace("seed: 2026", "seed: 2027"))
    assert "was changed" in run("compare", *places, "--confirm", "--prereg", path).stderr


def test_a_plan_is_drafted_from_dev_runs(run: Callable[..., Result], tmp_path: Path) -> None:
    """The way from a first comparison to a sealed plan, without typing a hash."""
    needle = {"task": "needle", "extra": {"request": {"task": "needle(count=40)", "data": None}}}
    solved = {id: [True, False] for id in made.names("dev", 5)}
    facts: dict[str, Any] = {
        **needle,
        "task_sha256": "a" * 64,
        "model_sha256": "b" * 64,
        "prompt_sha256": "c" * 64,
    }
    options = {"policy_options": {"buffer": 16, "budget": 64}}
    places = [
        save(tmp_path, made.run(solved, run=name, policy=name, **facts, **options))
        for name in ("random", "tova")
    ]
    words = ("--question", "Does it?", "--hypothesis", "It does.")
    path = tmp_path / "plan.yaml"
    shown = run("study", "draft", *places, "--out", path, *words)
    assert shown.exit_code == 0, shown.stderr
    assert run("study", "freeze", path).exit_code == 0
    assert json.loads(run("study", "check", path, "--json").output)["cells"] == ["needle/tiny/64"]
    other = ("--on", "ruler(count=40)", "--out", tmp_path / "other.yaml")
    assert run("study", "draft", *places, *other, *words).exit_code == 0
    checked = json.loads(run("study", "check", tmp_path / "other.yaml", "--json").output)
    assert checked["cells"] == ["ruler/tiny/64"]
    assert "exists" in run("study", "draft", *places, "--out", path, *words).stderr
    assert "no pairs" in run("study", "draft", places[0], "--out", tmp_path / "x.yaml", *words).stderr


def test_power_from_a_guess_and_from_a_pilot(run: Callable[..., Result], tmp_path: Path) -> None:
    """Planning needs no run; with one it is better."""
    assert "problems x 3 draws find 5.0 pp with 80 % power." in run("power", "0.05").output
    base, new = dev_run(tmp_path, "base", 4), dev_run(tmp_path, "new", 2)
    facts = json.loads(run("power", 0.05, "--pilot", base, "--pilot", new, "--problems", 40, "--json").output)
    assert facts["spread"]["draw_variance"] == 0.0
    assert facts["spread"]["effect_variance"] > 0.1
    assert facts["study"]["n"] == 40
    assert "3 pilots" in run("power", 0.05, *["--pilot", base] * 3).stderr
