"""`kvkeep analyze dilution`: the figures, the picture, and one sentence for what cannot be measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import Result

from kvkeep.testbed.model import Shape, make_model
from kvkeep.testbed.tokenizer import make_tokenizer

Run = Callable[..., Result]


@pytest.fixture(scope="session")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reasoner of two layers that has learned nothing."""
    folder = tmp_path_factory.mktemp("untrained")
    make_model(Shape(layers=2, width=32, head_dim=16, feed_forward=32), 0).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def test_the_dial_is_turned_and_everything_is_stated(run: Run, untrained: Path, tmp_path: Path) -> None:
    """The page reads these fields; a dial that does not reach the task would show a flat curve."""
    plot = tmp_path / "dilution.svg"
    result = run(
        "analyze", "dilution", "--task", "trace(size=S, count=20)", "--distractors", "0,12",
        "--model", untrained,
        "--policy", "keydiff", "--budget", 40, "--buffer", 8, "--limit", 3, "--plot", plot, "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert (facts["dial"], facts["reads"]) == ("distractors", "values")
    assert facts["policy"]["name"] == "keydiff"
    few, many = facts["settings"]
    assert (few["dial"], many["dial"], few["problems"]) == (0, 12, 3)
    assert many["distractors"] > few["distractors"] + 20
    assert many["tokens"] > few["tokens"] + 80
    for setting in (few, many):
        head, everyone = setting["heads"]
        layer, place = map(int, head["head"].split("."))
        assert head["mass_full"]["value"] == pytest.approx(setting["masses"][layer][place], abs=0.05)
        assert head["head"] == few["heads"][0]["head"]
        assert 0 < everyone["mass_full"]["value"] <= everyone["bound"] <= 1
        assert everyone["rho_useful"] < 1
        low, high = head["mass_full"]["interval"]
        assert low <= head["mass_full"]["value"] <= high
    words = [text.text for text in ElementTree.parse(plot).iter("{http://www.w3.org/2000/svg}text")]
    assert "distractors" in words
    assert {"full", "evicted", "predicted", "bound"} <= set(words)


def test_another_dial_and_other_reads_in_words(run: Run, untrained: Path) -> None:
    """A first look is taken at the table."""
    result = run(
        "analyze", "dilution", "--task", "trace(size=S, count=5)", "--vary", "steps=10,14",
        "--model", untrained,
        "--reads", "program", "--policy", "random", "--budget", 40, "--buffer", 8, "--limit", 1,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "steps" in result.stdout
    assert "random at 40 entries" in " ".join(result.stdout.split())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--distractors", "0,many"), "write --distractors 0,10,20"),
        (("--distractors", "0", "--vary", "steps=5"), "give one of them"),
        (("--vary", "lenght=5"), "no setting 'lenght'"),
        (("--limit", "0"), "at least 1"),
        (("--task", "gsm8k"), "no setting 'distractors'"),
        (("--reads", "all"), "reads 'all' are unknown"),
        (("--policy", "dbtrimkv"), "--gates"),
    ],
)
def test_what_cannot_be_measured_is_explained(
    run: Run, untrained: Path, flags: tuple[str, ...], message: str
) -> None:
    """One sentence, not a traceback from inside a task."""
    given = ("--task", "trace(count=5)", "--model", untrained, "--budget", 40, "--policy", "keydiff")
    result = run("analyze", "dilution", *given, "--buffer", 8, *flags)
    assert result.exit_code != 0
    assert message in " ".join(result.output.split())
