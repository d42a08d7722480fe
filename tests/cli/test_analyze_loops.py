"""`kvkeep analyze loops` as a user types it, on runs of a tiny random model that loops at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from kvkeep.testbed.model import Shape, make_model
from kvkeep.testbed.tokenizer import make_tokenizer
from tests.cli.test_analyze_values import Page

Run = Callable[..., Result]


@pytest.fixture(scope="module")
def runs(run: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three greedy runs of an untrained reasoner; one of them without notes."""
    folder = tmp_path_factory.mktemp("runs")
    model = folder / "model"
    make_model(Shape(layers=2, width=32, head_dim=16, feed_forward=32), 0).save_pretrained(model)
    make_tokenizer().save_pretrained(model)
    bounded = ("--budget", 96, "--buffer", 8, "--prefill", "after", "--log-evictions")
    arms = {
        "full": ("full",),
        "random": ("random", *bounded),
        "large": ("vase-attnv(select_by=smallest, reserve=0)", *bounded),
    }
    found = {}
    for name, flags in arms.items():
        found[name] = folder / name
        made = run(
            "eval", "--task", "trace(size=S, count=12)", "--model", model, "--prompt-mode", "counts",
            "--temperature", 0, "--max-new-tokens", 40, "--out", found[name], "--policy", *flags,
        )  # fmt: skip
        assert made.exit_code == 0, made.output
    return found


def test_loops_in_json_and_on_a_page(run: Run, runs: dict[str, Path], tmp_path: Path) -> None:
    """The page is made of what the JSON says, and needs no network."""
    page = tmp_path / "loops.html"
    result = run("analyze", "loops", *runs.values(), "--beside", "random", "--page", page, "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    arms = facts["arms"]
    assert list(arms) == ["full", "random", "large"]
    assert arms["full"]["evicted"] is None
    logged = [json.loads(line) for line in (runs["large"] / "run.jsonl").read_text().splitlines()]
    samples = [line for line in logged if line["kind"] == "sample"]
    assert arms["large"]["texts"] == len(samples)
    assert sum(arms["large"]["classes"].values()) == len(samples)
    for name in ("random", "large"):
        assert arms[name]["loops"]["count"] == sum(one["arm"] == name for one in facts["loops"])
    # An untrained model repeats one word from the first on: only the eviction of the prompt comes before.
    assert arms["large"]["evicted"]["texts"] > 2
    place = {name: arms[name]["evicted"]["before"]["range"]["value"] for name in ("random", "large")}
    assert place["large"] > place["random"] + 0.2
    assert facts["arms"]["large"]["difference"] is not None
    seen = Page(page.read_text())
    assert seen.count["svg"] == 4
    assert seen.count["table"] == 3


def test_tables_on_a_terminal(run: Run, runs: dict[str, Path]) -> None:
    """Which run has no notes is said."""
    result = run("analyze", "loops", *runs.values())
    assert result.exit_code == 0, result.output
    assert "Loops and failure classes" in result.stdout
    assert "No evictions were noted in full" in " ".join(result.stdout.split())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--before", "0"), "at least 1"),
        (("--beside", "nobody"), "choose from"),
        (("--page", "missing/page.html"), "a folder that exists"),
    ],
)
def test_mistakes_are_explained(
    run: Run, runs: dict[str, Path], flags: tuple[str, ...], message: str
) -> None:
    """One sentence each."""
    result = run("analyze", "loops", runs["full"], *flags)
    assert result.exit_code != 0
    assert message in " ".join(result.output.split())
