"""The design-space study from the command line."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from kvkeep.evaluation.runlog import differences, read_run

SMALL = (
    *("--task", "trace(size=S, count=40)", "--base", "snapkv(window=8)", "--budget", 24, "--buffer", 8),
    *("--screened", 3, "--problems", 6, "--model", "trace-1", "--mechanism", "adaptive-heads"),
    *("--mechanism", "repetition-heat", "--mechanism", "second-chance"),
)


def test_the_whole_study_in_small(run: Callable[..., Result], tmp_path: Path) -> None:
    """Screening, matching, sealing and confirming with real models; a second call only reads."""
    out, page = tmp_path / "runs", tmp_path / "page.md"
    done = run("study", "design-space", *SMALL, "--out", out, "--page", page)
    assert done.exit_code == 0, done.output
    assert "sealing the plan" in done.stderr
    text = " ".join(done.output.split())
    assert "of 3 mechanisms" in text
    for words in (
        *("adaptive-heads", "Six ways to be wrong", "+ adaptive-heads", "--repetition-rise 0.6"),
        "--kv-bits 4 --protect policy --kv-group 16 --kv-prompt full",
    ):
        assert words in page.read_text()
    logs = {path: path.read_bytes() for path in out.rglob("run.jsonl")}
    assert len(logs) >= 12  # four arms, in three stages
    again = run("study", "design-space", *SMALL, "--out", out, "--json")
    assert again.exit_code == 0, again.output
    facts = json.loads(again.stdout)
    assert [row["mechanism"]["name"] for row in facts["rows"]] == [
        *("adaptive-heads", "repetition-heat", "second-chance"),
    ]
    assert len(facts["rows"][0]["findings"]) == 6
    assert {path: path.read_bytes() for path in out.rglob("run.jsonl")} == logs
    for changed, said in (
        (("--budget", 25), "setting budget"),
        (("--screened", 4), "problems 3 instead of 4"),
        (("--base", "snapkv(window=8) + recency"), "policy 'snapkv' instead of 'snapkv + recency'"),
        (("--task", "trace(size=S, count=41)"), "--task"),
        (("--model", "trace-2"), "--model 'trace-1' instead of 'trace-2'"),
    ):
        kept = (
            SMALL
            if changed[0] != "--model"
            else [each for each in SMALL if each not in ("--model", "trace-1")]
        )
        other = run("study", "design-space", *kept, *changed, "--screen-only", "--out", out)
        assert other.exit_code == 2, (changed, other.output)
        assert said in other.stderr, other.stderr


@pytest.mark.parametrize("name", ["adaptive-heads", "repetition-heat", "second-chance"])
def test_a_header_says_how_to_repeat_the_run_alone(
    run: Callable[..., Result], tmp_path: Path, name: str
) -> None:
    """Flags of the mechanism included: a header that leaves them out describes another run."""
    named = SMALL[: SMALL.index("--mechanism")]
    out = tmp_path / "runs"
    done = run("study", "design-space", *named, "--mechanism", name, "--screen-only", "--out", out)
    assert done.exit_code == 0, done.output
    whole = read_run(out / "screen" / name)
    line = shlex.split(whole.header.extra["request"]["alone"])
    assert line[:2] == ["kvkeep", "eval"]
    repeated = run(*line[1:], "--out", tmp_path / "alone")
    assert repeated.exit_code == 0, repeated.output
    again = read_run(tmp_path / "alone")
    assert differences(again.header, whole.header) == []
    for one, other in zip(again.samples, whole.samples, strict=True):
        assert one.extra["text"] == other.extra["text"]
        assert one.mean_memory == other.mean_memory
    if name == "second-chance":
        assert whole.mean_memory < whole.mean_cache


def test_lists_its_mechanisms(run: Callable[..., Result]) -> None:
    """What is tried, and how to try it alone, without running anything."""
    shown = run("study", "design-space", "--show", "--mechanism", "recency", "--json")
    assert json.loads(shown.stdout)[0]["part"] == "recency"
    assert "shared-layers" in run("study", "design-space", "--show").stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "name a folder"),
        (["--mechanism", "telepathy", "--show"], "telepathy"),
        (["--model", "a/x", "--model", "b/x", "--out", "runs"], "same name"),
    ],
)
def test_refusals(run: Callable[..., Result], flags: list[str], message: str) -> None:
    """Before anything is run."""
    refused = run("study", "design-space", *flags)
    assert refused.exit_code == 2
    assert message in refused.stderr
