"""The page of `kvkeep analyze loops`: one file, in the style of a report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvkeep.evaluation.loops_summary import SHOWN
from kvkeep.evaluation.report import loops_tables as tables
from kvkeep.evaluation.report import plain_figures as draw
from kvkeep.evaluation.report.figures import Mark
from kvkeep.evaluation.report.page import render
from kvkeep.evaluation.report.plain_page import Page, Section
from kvkeep.evaluation.report.values_tables import span

Facts = Mapping[str, Any]


def loops_page(facts: Facts) -> str:
    """The page; needs jinja2."""
    section = Section(
        title="Which texts go round in circles, since when, and after which evictions?",
        figures=loops_figures(facts),
        tables={
            "Loops and failure classes": tables.class_table(facts),
            "What went just before a loop began": tables.before_table(facts),
            "Every loop": tables.loop_table(facts),
        },
        facts=(
            *(f"{name}: {arm['policy']}, {_settings(arm)}." for name, arm in facts["arms"].items()),
            *(
                f"{name} is not compared with {facts['beside']}: {'; '.join(arm['reasons'])}."
                for name, arm in facts["arms"].items()
                if arm["reasons"]
            ),
        ),
        legend={name: Mark(number) for number, name in enumerate(facts["arms"])},
    )
    return render(Page(title="Loops", sections=(section,)), written="from run logs")


def loops_figures(facts: Facts) -> dict[str, tuple[str, str]]:
    """Shares of loops, when they begin, and what went before them."""
    arms = facts["arms"]
    beside = arms[facts["beside"]]["loops"]["share"]
    rows = [
        (
            name,
            arm["loops"]["share"],
            beside,
            f"{arm['loops']['count']} of {arm['texts']} {span(arm['loops']['interval'], 100, 0)} %",
        )
        for name, arm in arms.items()
    ]
    found = {
        f"Texts that end in a loop (mark: {facts['beside']})": (draw.share_figure("loops", rows), ""),
        "Share of texts that are in a loop, by token": (
            draw.line_figure(
                "loops begun",
                "tokens written",
                [float(each) for each in facts["grid"]],
                {name: arm["begun"] for name, arm in arms.items()},
                0.0,
                max(0.1, *(arm["begun"][-1] for arm in arms.values())),
            ),
            "policies",
        ),
    }
    for feature, words in (
        ("range", "Place of the value ranges that go (1 largest, 0.5 by chance)"),
        ("large_lost", "Share of the largest tenth of ranges that goes"),
    ):
        # Every arm has its line, though it be empty: colours are those of the legend.
        lines = {
            name: [None] * SHOWN if arm["evicted"] is None else arm["evicted"]["lines"][feature]
            for name, arm in arms.items()
        }
        if any(value is not None for line in lines.values() for value in line):
            found[f"{words}, in the evictions before a loop"] = (
                draw.line_figure(
                    words,
                    "evictions before the loop began (-1: the last)",
                    [float(back - SHOWN) for back in range(SHOWN)],
                    lines,
                    0.0,
                    1.0,
                ),
                "policies",
            )
    return found


def _settings(arm: Facts) -> str:
    options = ", ".join(f"{name}={value}" for name, value in arm["options"].items())
    budget = "no budget" if arm["budget"] is None else f"budget {arm['budget']}"
    return (
        f"{budget}{', ' if options else ''}{options}; {arm['texts']} texts of {arm['task']}, {arm['model']}"
    )
