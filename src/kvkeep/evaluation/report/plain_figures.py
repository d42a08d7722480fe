"""Figures of `kvkeep analyze values`, `quantization` and `loops`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kvkeep.evaluation.report.svg import Axis, Drawing, ticks

WIDTH = 520.0
_LEFT, _RIGHT, _TOP = 46.0, 8.0, 10.0
_HEIGHT, _BOTTOM = 250.0, 214.0

Facts = Mapping[str, Any]


def box_figure(title: str, names: Sequence[str], spreads: Sequence[Mapping[str, float]], below: str) -> str:
    """P1 to P99, quartiles and middle of each spread on a logarithmic axis; the dot is the largest."""
    drawing = Drawing(WIDTH, _HEIGHT, title)
    shown = [one for one in spreads if one]
    y = _log_axis(
        drawing,
        min(max(one["p1"], one["largest"] * 1e-4) for one in shown),
        max(one["largest"] for one in shown),
    )
    width = (WIDTH - _RIGHT - _LEFT) / len(names)
    floor = 10 ** y.values[0]

    def place(value: float) -> float:
        return y.place(math.log10(max(value, floor)))

    for index, (name, one) in enumerate(zip(names, spreads, strict=True)):
        middle = _LEFT + width * (index + 0.5)
        if len(names) <= 20 or index % 5 == 0:
            drawing.text(middle, _BOTTOM + 16, name, anchor="middle", class_="tick")
        if not one:
            continue
        tip = f"{name}: P50 {one['p50']:.3g}, P99 {one['p99']:.3g}, largest {one['largest']:.3g}"
        drawing.line(middle, place(one["p1"]), middle, place(one["p99"]), "whisker c0")
        high, low = place(one["p75"]), place(one["p25"])
        drawing.add(
            "rect",
            x=middle - 0.3 * width,
            y=high,
            width=0.6 * width,
            height=max(low - high, 1.0),
            class_="bar c0",
            tip=tip,
        )
        level = place(one["p50"])
        drawing.line(middle - 0.3 * width, level, middle + 0.3 * width, level, "median")
        drawing.add("circle", cx=middle, cy=place(one["largest"]), r=1.5, class_="dot c1", tip=tip)
    drawing.text(_LEFT, _BOTTOM + 32, below, class_="tick")
    return drawing.render()


def _log_axis(drawing: Drawing, low: float, high: float) -> Axis:
    """A logarithmic axis with a line at every power of ten, or at 1, 2, 5 where there are few."""
    low, high = max(low, 1e-12), max(high, 1e-12)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    last = max(last, first + 1)
    factors = (1, 2, 5) if last - first <= 2 else (1,)
    axis = Axis([first, last], _BOTTOM, _TOP)
    for power in range(first, last + 1):
        for factor in factors:
            value = power + math.log10(factor)
            if value <= last + 1e-9:
                drawing.line(_LEFT, axis.place(value), WIDTH - _RIGHT, axis.place(value), "grid")
                drawing.text(
                    _LEFT - 6, axis.place(value) + 4, f"{10.0**value:.3g}", anchor="end", class_="tick"
                )
    return axis


def line_figure(
    title: str,
    x_name: str,
    xs: Sequence[float],
    lines: Mapping[str, Sequence[float | None]],
    low: float,
    high: float,
) -> str:
    """Lines on an axis of round numbers, colours in the order of the legend; ``None`` is no point."""
    drawing = Drawing(WIDTH, _HEIGHT, title)
    y = Axis(ticks(low, high), _BOTTOM, _TOP)
    x = Axis([xs[0], max(xs[-1], xs[0] + 1)], _LEFT + 8, WIDTH - _RIGHT - 8)
    for value in y.values:
        drawing.line(_LEFT, y.place(value), WIDTH - _RIGHT, y.place(value), "grid")
        drawing.text(_LEFT - 6, y.place(value) + 4, f"{value:g}", anchor="end", class_="tick")
    for value in xs if len(xs) <= 12 else xs[::5]:
        drawing.text(x.place(value), _BOTTOM + 16, f"{value:g}", anchor="middle", class_="tick")
    for number, (name, values) in enumerate(lines.items()):
        colour = f"c{number % 10}"
        points = [(a, b) for a, b in zip(xs, values, strict=True) if b is not None]
        path = " ".join(f"{x.place(a):.1f},{y.place(b):.1f}" for a, b in points)
        drawing.add("polyline", points=path, class_=f"thread {colour}")
        for a, b in points:
            drawing.add(
                "circle",
                cx=x.place(a),
                cy=y.place(b),
                r=2.5,
                class_=f"dot {colour}",
                tip=f"{name}, {x_name} {a:g}: {b:.3g}",
            )
    drawing.text(_LEFT, _BOTTOM + 32, x_name, class_="tick")
    return drawing.render()


def heat_figure(
    title: str, layers: Sequence[int], cells: Sequence[Sequence[float | None]], below: str
) -> str:
    """One row a layer: darker is larger, on a logarithmic scale over the whole figure."""
    known = [value for row in cells for value in row if value] or [1.0]
    height = max(6.0, min(20.0, 360.0 / len(layers)))
    drawing = Drawing(WIDTH, height * len(layers) + 26, title)
    low, high = math.log(min(known)), math.log(max(known))
    for index, (layer, row) in enumerate(zip(layers, cells, strict=True)):
        width = (WIDTH - _RIGHT - _LEFT) / len(row)
        if len(layers) <= 20 or index % 5 == 0:
            drawing.text(_LEFT - 6, height * (index + 0.5) + 4, str(layer), anchor="end", class_="tick")
        for column, value in enumerate(row):
            if value:
                share = (math.log(value) - low) / (high - low) if high > low else 1.0
                drawing.add(
                    "rect",
                    x=_LEFT + width * column,
                    y=height * index,
                    width=width - 1,
                    height=height - 1,
                    fill_opacity=f"{0.08 + 0.92 * share:.2f}",
                    class_="bar c0",
                    tip=f"layer {layer}, {column + 1}: {value:.3g}",
                )
    drawing.text(_LEFT, height * len(layers) + 18, below, class_="tick")
    return drawing.render()


def share_figure(title: str, rows: Sequence[tuple[str, float, float, str]]) -> str:
    """Bars of shares in 0..1, each with a mark at what was to be expected."""
    drawing = Drawing(WIDTH, 30.0 * len(rows) + 4, title)
    for index, (name, share, expected, words) in enumerate(rows):
        top = 30.0 * index
        drawing.text(0, top + 12, name)
        drawing.text(WIDTH, top + 12, words, anchor="end", class_="value")
        drawing.add("rect", x=0, y=top + 17, width=max(1.0, share * WIDTH), height=7, rx=2, class_="bar c0")
        drawing.line(expected * WIDTH, top + 14, expected * WIDTH, top + 27, "median")
    return drawing.render()


def curve_figure(title: str, curve: Sequence[Mapping[str, float]]) -> str:
    """Error against range on logarithmic axes: what was measured, and the law."""
    drawing = Drawing(WIDTH, _HEIGHT, title)
    points = [one for one in curve if one["range"] > 0 and one["error"] > 0 and one["law"] > 0]
    if not points:
        return drawing.render()
    y = _log_axis(
        drawing,
        min(min(one["error"], one["law"]) for one in points),
        max(max(one["error"], one["law"]) for one in points),
    )
    first, last = (math.log10(one["range"]) for one in (points[0], points[-1]))
    x = Axis([first, max(last, first + 0.01)], _LEFT + 8, WIDTH - _RIGHT - 8)
    for number, name in enumerate(("error", "law")):
        where = [(x.place(math.log10(one["range"])), y.place(math.log10(one[name]))) for one in points]
        drawing.add(
            "polyline", points=" ".join(f"{a:.1f},{b:.1f}" for a, b in where), class_=f"thread c{number}"
        )
        for one, (a, b) in zip(points, where, strict=True):
            tip = f"range {one['range']:.3g}: {name} {one[name]:.3g}"
            drawing.add("circle", cx=a, cy=b, r=3, class_=f"dot c{number}", tip=tip)
    for one in (points[0], points[-1]):
        drawing.text(
            x.place(math.log10(one["range"])),
            _BOTTOM + 16,
            f"{one['range']:.2f}",
            anchor="middle",
            class_="tick",
        )
    drawing.text(
        _LEFT, _BOTTOM + 32, "range over the middle of its layer; error over that of its layer", class_="tick"
    )
    return drawing.render()
