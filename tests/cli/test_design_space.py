"""The design-space study from the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

SMALL = (
    *("--task", "trace(size=S, count=40)", "--base", "snapkv(window=8)", "--budget", 24, "--buffer", 8),
    *("--screened", 3, "--problems", 6, "--model", "trace-1", "--mechanism", "adaptive-heads"),
    *("--mechanism", "repetition-heat"),
)


def test_the_whole_study_in_small(run: Callable[..., Result], tmp_path: Path) -> None:
    """Screening, matching, sealing and confirming with real models; a second call only reads."""
    out, page = tmp_path / "runs", tmp_path / "page.md"
    done = run("study", "design-space", *SMALL, "--out", out, "--page", page)
    assert done.exit_code == 0, done.output
    assert "sealing the plan" in done.stderr
    text = " ".join(done.output.split())
    assert "of 2 mechanisms" in text
    for words in ("adaptive-heads", "Six ways to be wrong", "+ adaptive-heads", "--repetition-rise 0.6"):
        assert words in page.read_text()
    logs = {path: path.read_bytes() for path in out.rglob("run.jsonl")}
    assert len(logs) >= 9  # three arms, in three stages
    again = run("study", "design-space", *SMALL, "--out", out, "--json")
    assert again.exit_code == 0, again.output
    facts = json.loads(again.stdout)
    assert [row["mechanism"]["name"] for row in facts["rows"]] == ["adaptive-heads", "repetition-heat"]
    assert len(facts["rows"][0]["findings"]) == 6
    assert {path: path.read_bytes() for path in out.rglob("run.jsonl")} == logs
    for changed, said in (
        (("--budget", 25), "setting budget"),
        (("--screened", 4), "problems 3 instead of 4"),
        (("--base", "snapkv(window=8) + merge"), "policy 'snapkv' instead of 'snapkv + merge'"),
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
