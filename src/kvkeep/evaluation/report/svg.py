"""Drawing small figures as SVG: no scripts, no fonts, a few kilobytes each."""

from __future__ import annotations

import math
from html import escape


class Drawing:
    """Shapes on a canvas of fixed size, which the page scales.

    Colours come from the page's style sheet by class, so that a figure follows light and dark.

    Parameters
    ----------
    width, height
        Units; text is 12 units high.
    title
        What a screen reader says.
    """

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self._parts: list[str] = []

    def add(self, tag: str, *, text: str | None = None, tip: str | None = None, **attributes: object) -> None:
        """Add a shape; ``tip`` shows when the pointer rests on it."""
        written = "".join(
            f' {name.rstrip("_").replace("_", "-")}="{escape(_short(value))}"'
            for name, value in attributes.items()
            if value is not None
        )
        inner = (f"<title>{escape(tip)}</title>" if tip else "") + escape(text or "")
        self._parts.append(f"<{tag}{written}>{inner}</{tag}>" if inner else f"<{tag}{written}/>")

    def line(self, x1: float, y1: float, x2: float, y2: float, class_: str) -> None:
        """A straight line."""
        self.add("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)

    def text(self, x: float, y: float, text: str, *, anchor: str = "start", class_: str = "label") -> None:
        """A piece of text; ``y`` is its base line."""
        self.add("text", x=x, y=y, text=text, text_anchor=anchor, class_=class_)

    def dot(self, x: float, y: float, shape: str, class_: str, tip: str) -> None:
        """A point: a disc (``"s0"``), a square (``"s1"``) or a diamond (``"s2"``)."""
        if shape == "s0":
            self.add("circle", cx=x, cy=y, r=4.5, class_=class_, tip=tip)
            return
        turn = f"rotate(45 {x:.1f} {y:.1f})" if shape == "s2" else None
        self.add("rect", x=x - 4, y=y - 4, width=8, height=8, transform=turn, class_=class_, tip=tip)

    def render(self) -> str:
        """The figure as markup."""
        return (
            f'<svg viewBox="0 0 {_short(self.width)} {_short(self.height)}" role="img" '
            f'aria-label="{escape(self.title)}">{"".join(self._parts)}</svg>'
        )


def _short(value: object) -> str:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers that cover a range, about so many.

    Examples
    --------
    >>> ticks(3, 97)
    [0, 20, 40, 60, 80, 100]
    """
    span = high - low if high > low else abs(high) or 1.0
    power = 10 ** math.floor(math.log10(span / about))
    step = next(power * factor for factor in (1, 2, 5, 10) if span / (power * factor) <= about)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    values = [index * step for index in range(first, max(last, first + 1) + 1)]
    return [int(value) if float(value).is_integer() else round(value, 10) for value in values]


class Axis:
    """Maps numbers to a stretch of the canvas.

    Parameters
    ----------
    values
        Round numbers that cover the data.
    start, end
        Where the first and the last stand.
    """

    def __init__(self, values: list[float], start: float, end: float) -> None:
        self.values, self.start, self.end = values, start, end

    def place(self, value: float) -> float:
        """Where a number stands."""
        low, high = self.values[0], self.values[-1]
        return self.start + (value - low) / (high - low) * (self.end - self.start)
