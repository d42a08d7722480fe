"""Tables on terminals of any width: a number that is not printed was measured in vain."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import Result

from kvkeep.cli.tables import column_widths, show_table
from tests.cli.conftest import words

NAMES = ("policy", "asked for", "KV bytes", "mean")
LONG = "triattention + sample(temperature=0.5) + reserve(slots=128, magnitude=l2)"
ROWS = [
    ("full", "everything", "100.0 MiB", "2034.5"),
    (LONG, "512 entries = ratio 0.25 of 2058 tokens", "25.0 MiB", "529.6"),
]
TEXTS = {"policy": 12, "asked for": 10}


@pytest.mark.parametrize("width", [20, 30, 40, 45, 60, 80, 200])
def test_no_width_loses_a_number_or_a_letter(width: int) -> None:
    """rich cuts with an ellipsis what does not fit: first the numbers, since names are long."""
    console = Console(width=width)
    with console.capture() as captured:
        show_table(NAMES, ROWS, texts=TEXTS, console=console)
    printed = captured.get()
    assert "…" not in printed
    assert all(len(line) <= width for line in printed.splitlines())
    for row in ROWS:
        for number in row[2:]:
            assert re.search(rf"(?<![\d.]){re.escape(number)}(?![\d.])", " ".join(printed.split()))
    if column_widths(NAMES, ROWS, TEXTS, width) is None:
        assert "".join(LONG.split()) in "".join(printed.split())


def test_texts_fold_before_the_table_is_given_up() -> None:
    """Columns can be compared by eye, paragraphs cannot."""
    wide = column_widths(NAMES, ROWS, TEXTS, 200)
    assert wide == [len(LONG), 39, 9, 6]
    folded = column_widths(NAMES, ROWS, TEXTS, 60)
    assert folded is not None
    assert sum(folded) + 3 == 60
    assert folded[2:] == [9, 6]
    assert column_widths(NAMES, ROWS, TEXTS, 40) == [12, 10, 9, 6]
    assert column_widths(NAMES, ROWS, TEXTS, 39) is None


def test_a_heading_of_several_words_folds_above_its_numbers() -> None:
    """Without it the widest heading decides whether there is a table at all."""
    assert column_widths(["cache", "bytes per row"], [["full", "12 MiB"]], {"cache": 5}, 12) == [5, 6]


@pytest.mark.parametrize("width", [40, 60])
def test_a_composition_on_a_narrow_terminal(
    run: Callable[..., Result], tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """As a user meets it: the measured numbers were an ellipsis each."""
    monkeypatch.setenv("COLUMNS", str(width))
    policy = "snapkv + sample(temperature=0.5) + reserve(slots=8, magnitude=l2)"
    flags = ("--policy", policy, "--budget", 24, "--buffer", 8, "--max-new-tokens", 20)
    result = run("generate", words(30), "--model", tiny_folder, *flags)
    assert result.exit_code == 0, result.stderr
    table = " ".join(result.stdout.split())
    assert "…" not in table
    assert "tokens 32+20" in table
    assert re.search(r"· peak \d+ ·.* evictions 2 ", table)
    assert policy in table
