"""Figures of kvkeep's pages as files of their own, for docs/figures."""

from collections.abc import Sequence
from html import escape

_STYLE = """<style>
svg { background: #fff; --ink: #1c2024; --soft: #60646c; --line: #d9dce1;
  --c0: #3b6fd4; --c1: #c2571a; --c2: #1f8a5f; --c3: #8e4ec6; --c4: #c2298a;
  --c5: #7d6b00; --c6: #0b7d9c; --c7: #a33c3c; --c8: #4a7a1f; --c9: #5b5bd6; }
@media (prefers-color-scheme: dark) {
  svg { background: #16181b; --ink: #eceef0; --soft: #a0a5ad; --line: #3a3f46;
  --c0: #7aa5ff; --c1: #ff9a5c; --c2: #53c795; --c3: #c297f2; --c4: #f27cc4;
  --c5: #d8c24a; --c6: #4fc3df; --c7: #f28b82; --c8: #9ccc65; --c9: #a5a5ff; } }
text { font: 12px system-ui, sans-serif; fill: var(--ink); }
.tick { fill: var(--soft); } .grid { stroke: var(--line); }
.median { stroke: var(--ink); stroke-width: 2; } .thread { fill: none !important; stroke-width: 1.5; }
"""


def standalone(drawing: str, title: str, legend: Sequence[str] = (), edge: float = 12) -> str:
    """A figure of a page, with title, colours and legend of its own.

    Parameters
    ----------
    drawing
        What :meth:`kvkeep.evaluation.report.svg.Drawing.render` returned.
    legend
        Names of the colours, in their order.
    """
    opening, body = drawing.split(">", 1)
    width, height = (float(each) for each in opening.split('viewBox="0 0 ', 1)[1].split('"', 1)[0].split())
    colours = "".join(
        f".c{n} {{ stroke: var(--c{n}); fill: var(--c{n}); }} .bar.c{n}, .dot.c{n} {{ stroke: none; }}"
        for n in range(10)
    )
    rows, across, marks = 0, 0.0, []
    for number, name in enumerate(legend):
        room = 26 + 6.8 * len(name)
        if across and across + room > width:
            rows, across = rows + 1, 0.0
        y = height + 52 + 18 * rows
        marks.append(
            f'<rect x="{across:.1f}" y="{y - 9:.1f}" width="10" height="10" class="bar c{number % 10}"/>'
        )
        marks.append(f'<text x="{across + 15:.1f}" y="{y:.1f}">{escape(name)}</text>')
        across += room
    deep = height + 36 + (18 * (rows + 1) if legend else 0)
    box = f"{-edge:g} {-edge:g} {width + 2 * edge:g} {deep + 2 * edge:g}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" role="img" aria-label="{escape(title)}">'
        f'{_STYLE}{colours}</style><text x="0" y="12" font-weight="600">{escape(title)}</text>'
        f'<g transform="translate(0 28)">{body.removesuffix("</svg>")}</g>{"".join(marks)}</svg>\n'
    )
