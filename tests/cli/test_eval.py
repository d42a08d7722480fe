"""`kvkeep eval` as a user types it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from kvkeep.evaluation.runlog import read_log
from tests.evaluation.data import DATA, needs_data

Run = Callable[..., Result]
NEEDLE = "needle(length=80, count=30)"
TASK = ("--task", NEEDLE, "--limit", 6, "--max-new-tokens", 8, "--batch-size", 4)
POLICY = ("--policy", "vase-attnv", "--budget", 24, "--buffer", 8)


def facts(result: Result) -> Any:
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_a_run_is_logged_and_summed_up(run: Run, tiny_folder: Path, tmp_path: Path) -> None:
    """The command from the README, on a model of noise: every sample is there and was measured."""
    arguments = ("eval", *TASK, *POLICY, "--model", tiny_folder, "--draws", 2, "--temperature", 1)
    found = facts(run(*arguments, "--out", tmp_path / "x", "--json"))
    log = read_log(tmp_path / "x")
    assert found["samples"] == len(log.run.samples) == 12
    assert found["draws"] == 2
    assert log.footer is not None
    assert found["mean_cache"] == log.run.mean_cache < 40  # prompts are longer than that
    assert all(sample.prompt_tokens <= 48 for sample in log.run.samples)
    assert log.run.header.sampling["temperature"] == 1
    assert log.run.header.sampling["preset"] == "greedy changed"
    again = run(*arguments, "--out", tmp_path / "x", "--resume")
    assert again.exit_code == 0, again.stderr
    assert "avg@2" in again.stdout
    assert "mean" in again.stdout


def test_the_full_cache_needs_no_budget(run: Run, tiny_folder: Path, tmp_path: Path) -> None:
    """The baseline of every table; it holds the prompt and what was written."""
    found = facts(
        run("eval", *TASK, "--policy", "full", "--model", tiny_folder, "--out", tmp_path / "x", "--json")
    )
    assert found["budget"] is None
    assert found["peak_cache"] > 40


def test_a_selector_stores_everything_and_reads_less(run: Run, tiny_folder: Path, tmp_path: Path) -> None:
    """The two axes on which eviction and selection can be compared."""
    policy = ("--policy", "quest", "--token-budget", 12, "--option", "page=4", "--option", "dense-layers=0")
    arguments = ("eval", *TASK, *policy, "--model", tiny_folder, "--out", tmp_path / "x")
    found = facts(run(*arguments, "--json"))
    run_log = read_log(tmp_path / "x").run
    assert found["label"] == "quest, 12 read"
    assert found["mean_cache"] == run_log.mean_cache > 40
    assert (
        found["mean_read_by_query"]
        <= 12
        < found["mean_read"]
        == run_log.mean_read
        <= found["peak_read"]
        <= 24
    )
    assert all(sample.mean_read < sample.mean_cache for sample in run_log.samples if sample.steps)
    said = run(*arguments, "--resume").stdout
    assert f"read in a step: mean {found['mean_read']:.1f}" in said
    assert "a query head reads" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policy", "quest", "--budget", 64), "--token-budget says how many"),
        (("--policy", "snapkv", "--budget", 64, "--token-budget", 64), "snapkv is none of them"),
        (("--policy", "quest", "--option", "token-budget=64"), "has a flag of its own"),
        (("--policy", "quest", "--engine", "vllm"), "quest is a selector"),
    ],
)
def test_budgets_are_not_mixed_up(
    run: Run, tiny_folder: Path, tmp_path: Path, arguments: Any, message: str
) -> None:
    """128 entries kept and 128 entries read are different things."""
    result = run("eval", *TASK, *arguments, "--model", tiny_folder, "--out", tmp_path / "x")
    assert result.exit_code == 2, result.output
    assert message in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--task", "needle"), "--out"),
        (("--task", "nedle", "--out", "x"), "did you mean 'needle'"),
        (("--task", "needle", "--out", "x", "--split", "all"), "dev, or confirm with a frozen"),
        (("--task", "needle", "--out", "x", "--preset", "vasе"), "sampling preset"),
        (("--task", "needle", "--out", "x", "--workers", 2), "--ray"),
        (("--task", "needle", "--out", "x", "--draws", 3), "copies of each other"),
        (("--task", "needle(count=4)", "--out", "x", "--draws", 0), "draws 0"),
    ],
)
def test_wrong_flags_cost_nothing(
    run: Run, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: Any, message: str
) -> None:
    """A mistake must be told before hours of generation, in one sentence, with exit code 2."""
    monkeypatch.chdir(tmp_path)
    result = run("eval", "--policy", "snapkv", "--budget", 128, "--model", tiny_folder, *arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@needs_data
def test_the_split_of_math500_is_the_frozen_one(run: Run) -> None:
    """201 and 299 problems, these and no others: the numbers of a paper can be repeated on them."""
    found = facts(run("eval", "split", "math500", "--data", DATA, "--json"))
    assert (found["dev"]["problems"], found["confirm"]["problems"]) == (201, 299)
    assert found["dev"]["ids_sha256"] == "ef8b26fd453ffb961885d3f29c8e167505246aced55217d2fc7e08ce66cf122a"
    assert (
        found["confirm"]["ids_sha256"] == "22e0cbb10c49847f0218befebb550f887cbba85631da58419325b8bb55d1ec38"
    )


def test_texts_are_graded_again_without_generating(run: Run, tiny_folder: Path, tmp_path: Path) -> None:
    """A mended grader is applied to old texts; the old log stays as evidence of what was done."""
    place = ("--model", tiny_folder, "--out", tmp_path / "old")
    facts(run("eval", *TASK, *POLICY, *place, "--json"))
    path = tmp_path / "old" / "run.jsonl"
    before = path.read_text()
    sample = read_log(tmp_path / "old").run.samples[0]
    assert sample.answer_class != "correct"
    number = needle_number(sample.id)
    path.write_text(before.replace(json.dumps(sample.extra["text"]), f'"It is {number}."', 1))
    found = facts(run("eval", "regrade", tmp_path / "old", "--out", tmp_path / "new", "--json"))
    assert found["outcomes"]["correct"] == 1
    log = read_log(tmp_path / "new")
    assert log.footer is not None
    assert {s.key for s in log.run.samples} == {s.key for s in read_log(tmp_path / "old").run.samples}
    assert "regraded_from" in log.run.header.extra
    again = run("eval", "regrade", tmp_path / "old", "--out", tmp_path / "new")
    assert again.exit_code == 2
    assert "exists" in again.stderr


def needle_number(name: str) -> str:
    """The right answer to one of the problems of TASK."""
    from kvkeep.evaluation.tasks.registry import make_task

    return next(p.reference for p in make_task(NEEDLE).all_problems() if p.id == name)


def test_match_finds_the_budget_of_equal_memory(run: Run, tiny_folder: Path, tmp_path: Path) -> None:
    """Policies compared at equal names instead of equal memory are not compared at all."""
    task = ("--task", "needle(length=80, count=12)", "--max-new-tokens", 40, "--temperature", 1)
    place = ("--model", tiny_folder, "--out", tmp_path / "reference")
    facts(run("eval", *task, *POLICY, *place, "--json"))
    tries = ("--out", tmp_path / "tries", "--tolerance", 0.04)
    arguments = ("match", tmp_path / "reference", "--policy", "snapkv", "--buffer", 4, *tries)
    found = facts(run(*arguments, "--json"))
    assert abs(found["ratio"] - 1) <= 0.04
    assert found["budget"] > 24  # a smaller buffer holds less at the same budget
    measured = read_log(tmp_path / "tries" / f"budget-{found['budget']}").run
    assert measured.mean_cache == found["mean_cache"]
    again = run(*arguments)
    assert f"budget {found['budget']} after" in again.stdout


def test_only_dev_runs_are_matched(run: Run, tiny_folder: Path, tmp_path: Path) -> None:
    """A budget chosen on confirmation problems has seen them."""
    place = tmp_path / "seen"
    facts(run("eval", *TASK, *POLICY, "--model", tiny_folder, "--out", place, "--json"))
    log = place / "run.jsonl"
    log.write_text(log.read_text().replace('"split": "dev"', '"split": "confirm"', 1))
    result = run("match", place, "--policy", "snapkv", "--buffer", 8, "--out", tmp_path / "tries")
    assert result.exit_code == 1
    assert "dev" in result.stderr
    assert not (tmp_path / "tries").exists()
    everything = run("match", place, "--policy", "full", "--out", tmp_path / "tries")
    assert "no budget to match" in everything.stderr


def test_other_ways_of_writing_are_flags_of_the_run(run: Run, tiny_folder: Path, tmp_path: Path) -> None:
    """A log that does not say that its question was read again would be compared as if it had not been."""
    flags = ("--refeed-every", 3, "--repetition-rise", 0.5, "--repetition-ngram", 2)
    facts(run("eval", *TASK, *POLICY, "--model", tiny_folder, *flags, "--out", tmp_path / "x", "--json"))
    log = read_log(tmp_path / "x")
    sampling = log.run.header.sampling
    assert (sampling["refeed_every"], sampling["repetition_rise"], sampling["repetition_ngram"]) == (
        3,
        0.5,
        2,
    )
    assert log.run.header.extra["draws_differ_by"] == "sampling"
    never = ("--policy", "full", "--refeed-evictions", 2, "--out", tmp_path / "y")
    refused = run("eval", *TASK, "--model", tiny_folder, *never)
    assert refused.exit_code == 2
    assert "full evicts nothing" in refused.stderr
    long = [sample for sample in log.run.samples if sample.tokens > 4]
    assert long
    assert all(sample.extra["refed"] >= sample.prompt_tokens for sample in long)
    other = run("eval", *TASK, *POLICY, "--model", tiny_folder, "--out", tmp_path / "x", "--resume")
    assert other.exit_code != 0  # another way of writing is another run
    refused = run("eval", *TASK, *POLICY, *flags, "--engine", "vllm", "--out", tmp_path / "y")
    assert "--repetition-rise has no meaning for --engine vllm" in refused.stderr
