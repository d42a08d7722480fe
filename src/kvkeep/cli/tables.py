"""Tables that lose nothing on a narrow terminal: texts fold, numbers do not, and without room for both
every row becomes a paragraph."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from rich.box import SIMPLE
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text


def show_table(
    names: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    texts: Mapping[str, int],
    title: str | None = None,
    console: Console | None = None,
) -> None:
    """Print rows under column names.

    Parameters
    ----------
    texts
        The columns that hold text, and the width below which each would be unreadable; all others hold
        numbers and stand on the right.
    """
    console = console or Console()
    widths = column_widths(names, rows, texts, console.width)
    if widths is None:
        if title is not None:
            console.print(title, highlight=False, markup=False)
        for first, *others in rows:
            console.print(Text(first))
            pairs = [f"{name} {value}" for name, value in zip(names[1:], others, strict=True)]
            console.print(Text(_paragraph(pairs, console.width)), style="dim")
        return
    table = Table(
        title=title and Text(title), title_justify="left", box=SIMPLE, show_edge=False, padding=0, min_width=1
    )
    for name, width in zip(names, widths, strict=True):
        table.add_column(name, justify="left" if name in texts else "right", width=width, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)


def column_widths(
    names: Sequence[str], rows: Sequence[Sequence[str]], texts: Mapping[str, int], width: int
) -> list[int] | None:
    """Width of each column; ``None`` if the texts would become unreadable beside whole numbers."""
    cells = [max(map(cell_len, column), default=0) for column in zip(*rows, strict=True)]
    widths = [max(cell_len(name), cell) for name, cell in zip(names, cells, strict=True)]
    least = [
        min(wide, texts[name]) if name in texts else max(cell, *map(cell_len, name.split()))
        for name, wide, cell in zip(names, widths, cells, strict=True)
    ]
    for _ in range(sum(widths) + len(widths) - 1 - width):
        shrinkable = [place for place, wide in enumerate(widths) if wide > least[place]]
        if not shrinkable:
            return None
        widths[max(shrinkable, key=widths.__getitem__)] -= 1
    return widths


def _paragraph(pairs: Sequence[str], width: int) -> str:
    """Pairs one after another; a line ends between two of them, or inside one that is longer than a line."""
    indent, joint = "  ", "\xa0"  # textwrap does not break at it
    kept = [pair.replace(" ", joint) if cell_len(pair) + 4 <= width else pair for pair in pairs]
    lines = textwrap.fill(f"{joint}· ".join(kept), width, initial_indent=indent, subsequent_indent=indent)
    return lines.replace(joint, " ")
