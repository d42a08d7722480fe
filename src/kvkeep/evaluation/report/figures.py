"""The figures of a report. Each is drawn for a phone's width and scales up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvkeep.core.budget import format_bytes
from kvkeep.evaluation.records import Run
from kvkeep.evaluation.report.summary import OUTCOMES, Summary
from kvkeep.evaluation.report.svg import Axis, Drawing, ticks

WIDTH = 420
_COLOURS = 10
_LEFT, _RIGHT = 44, 12
_ROW = 24
_QUANTILES = (5, 25, 50, 75, 95)


@dataclass(frozen=True)
class Mark:
    """How a policy is drawn: one of ten colours, and after ten policies another shape."""

    number: int

    @property
    def colour(self) -> str:
        """Style class of the colour."""
        return f"c{self.number % _COLOURS}"

    @property
    def shape(self) -> str:
        """Style class of the shape: a disc, a square, then a diamond."""
        return f"s{self.number // _COLOURS % 3}"


def marks(summaries: Sequence[Summary]) -> dict[str, Mark]:
    """A mark for each policy, in order of appearance."""
    names = dict.fromkeys(each.policy for each in summaries)
    return {name: Mark(place) for place, name in enumerate(names)}


def legend(summaries: Sequence[Summary]) -> dict[str, Mark]:
    """The mark of each policy, by the words that explain it."""
    drawn, words = marks(summaries), {each.policy: each.policy for each in summaries}
    for each in summaries:
        if each.budget is None:
            words[each.policy] = f"{each.policy}, at a mean cache of {each.mean_cache:.0f}"
    return {words[policy]: mark for policy, mark in drawn.items()}


def accuracy_figure(summaries: Sequence[Summary]) -> str:
    """Accuracy against measured mean cache, with intervals; runs of one policy are joined.

    Points that share a mean cache are moved aside by a few units so that all can be seen. A full cache
    is a level across the figure: it would squeeze the others into a corner.
    """
    known = [each for each in summaries if each.accuracy is not None]
    bounded = [each for each in known if each.budget is not None] or known
    top, bottom = 26, 232
    drawing = Drawing(WIDTH, 276, "Accuracy against mean cache")
    y = Axis([0, 20, 40, 60, 80, 100], bottom, top)
    x = Axis(ticks(0, max((each.mean_cache for each in bounded), default=1.0)), _LEFT, WIDTH - _RIGHT)
    for value in y.values:
        drawing.line(_LEFT, y.place(value), WIDTH - _RIGHT, y.place(value), "grid")
        drawing.text(_LEFT - 6, y.place(value) + 4, f"{value}", anchor="end", class_="tick")
    for value in x.values:
        drawing.text(x.place(value), bottom + 18, f"{value}", anchor="middle", class_="tick")
    drawing.text(_LEFT, bottom + 36, "mean cache, entries per KV head and layer")
    scored = any(each.metric == "score" for each in known)
    drawing.text(0, 12, "score, % of the parts" if scored else "% correct")
    drawn = marks(summaries)
    for each in known:
        if each not in bounded:
            _level(drawing, each, y, drawn[each.policy])
    policies = list(dict.fromkeys(each.policy for each in bounded))
    for place, policy in enumerate(policies):
        points = sorted((each for each in bounded if each.policy == policy), key=lambda each: each.mean_cache)
        aside = (place - (len(policies) - 1) / 2) * min(4.0, 40 / len(policies))
        _curve(drawing, points, x, y, drawn[policy], aside)
    return drawing.render()


def _curve(drawing: Drawing, points: Sequence[Summary], x: Axis, y: Axis, mark: Mark, aside: float) -> None:
    where = [(x.place(each.mean_cache) + aside, y.place(100 * _estimate(each))) for each in points]
    if len(where) > 1:
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in where)
        drawing.add("polyline", points=path, class_=f"thread {mark.colour}")
    for each, (a, b) in zip(points, where, strict=True):
        low, high = _interval(each)
        drawing.line(a, y.place(100 * low), a, y.place(100 * high), f"whisker {mark.colour}")
        drawing.dot(a, b, mark.shape, f"dot {mark.colour}", f"{each.label}: {each.accuracy}")


def _level(drawing: Drawing, each: Summary, y: Axis, mark: Mark) -> None:
    low, high = _interval(each)
    width = WIDTH - _RIGHT - _LEFT
    tip = f"{each.label}: {each.accuracy}"
    top, bottom = y.place(100 * high), y.place(100 * low)
    drawing.add(
        "rect", x=_LEFT, y=top, width=width, height=bottom - top, class_=f"band {mark.colour}", tip=tip
    )
    level = y.place(100 * _estimate(each))
    drawing.line(_LEFT, level, WIDTH - _RIGHT, level, f"level {mark.colour}")


def _estimate(summary: Summary) -> float:
    return summary.accuracy.estimate if summary.accuracy is not None else 0.0


def _interval(summary: Summary) -> tuple[float, float]:
    low, high = summary.accuracy.interval if summary.accuracy is not None else (0.0, 0.0)
    return max(0.0, low), min(1.0, high)


def speed_figure(summaries: Sequence[Summary]) -> str:
    """Tokens per second, one bar a run."""
    rows = [(each, each.tokens_per_second or 0.0) for each in summaries]
    return _bars(summaries, "Tokens per second", [(value, f"{value:.0f}") for _, value in rows])


def memory_figure(summaries: Sequence[Summary]) -> str:
    """Most bytes that a batch held for keys and values, one bar a run."""
    values = [float(each.kv_bytes or 0) for each in summaries]
    return _bars(summaries, "Memory of keys and values", [(value, format_bytes(value)) for value in values])


def _bars(summaries: Sequence[Summary], title: str, values: Sequence[tuple[float, str]]) -> str:
    drawn = marks(summaries)
    drawing = Drawing(WIDTH, len(summaries) * (_ROW + 12) + 4, title)
    longest = max(value for value, _ in values) or 1.0
    for place, (each, (value, words)) in enumerate(zip(summaries, values, strict=True)):
        top = place * (_ROW + 12)
        drawing.text(0, top + 13, each.label)
        drawing.text(WIDTH, top + 13, words, anchor="end", class_="value")
        length = max(1.0, value / longest * WIDTH)
        drawing.add(
            "rect", x=0, y=top + 18, width=length, height=8, rx=2, class_=f"bar {drawn[each.policy].colour}"
        )
    return drawing.render()


def outcome_figure(summaries: Sequence[Summary]) -> str:
    """What became of the samples: one stacked bar a run."""
    drawing = Drawing(WIDTH, len(summaries) * (_ROW + 12) + 4, "What became of the samples")
    for place, each in enumerate(summaries):
        top, left = place * (_ROW + 12), 0.0
        drawing.text(0, top + 13, each.label)
        for number, name in enumerate(OUTCOMES):
            share = each.outcomes[name] / each.samples
            if share:
                tip = f"{each.label}: {each.outcomes[name]} of {each.samples} {name}"
                drawing.add(
                    "rect", x=left, y=top + 18, width=share * WIDTH, height=10, class_=f"o{number}", tip=tip
                )
            left += share * WIDTH
    return drawing.render()


def length_figure(runs: Sequence[Run], summaries: Sequence[Summary]) -> str:
    """New tokens per sample: 5th to 95th percentile, quartiles and median of each run."""
    drawn = marks(summaries)
    spread = [np.percentile([sample.tokens for sample in run.samples], _QUANTILES) for run in runs]
    height = len(runs) * (_ROW + 12)
    drawing = Drawing(WIDTH, height + 26, "Lengths of the answers")
    x = Axis(ticks(0, max(float(each[-1]) for each in spread)), 6, WIDTH - 14)
    for value in x.values:
        drawing.line(x.place(value), 0, x.place(value), height, "grid")
        drawing.text(x.place(value), height + 16, f"{value}", anchor="middle", class_="tick")
    for place, (each, quantiles) in enumerate(zip(summaries, spread, strict=True)):
        top, colour = place * (_ROW + 12), drawn[each.policy].colour
        a, b, c, d, e = (x.place(float(value)) for value in quantiles)
        tip = f"{each.label}: median {quantiles[2]:.0f}, 95 % below {quantiles[4]:.0f} tokens"
        drawing.text(6, top + 13, each.label)
        drawing.line(a, top + 23, e, top + 23, f"whisker {colour}")
        drawing.add(
            "rect", x=b, y=top + 18, width=max(d - b, 1.5), height=10, rx=2, class_=f"bar {colour}", tip=tip
        )
        drawing.line(c, top + 16, c, top + 30, "median")
    return drawing.render()
