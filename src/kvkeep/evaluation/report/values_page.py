"""The pages of `kvkeep analyze values` and `quantization`: one file each, in the style of a report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvkeep.evaluation.report import plain_figures as draw
from kvkeep.evaluation.report import values_tables as tables
from kvkeep.evaluation.report.figures import Mark
from kvkeep.evaluation.report.page import render
from kvkeep.evaluation.report.plain_page import Page, Section

Facts = Mapping[str, Any]


def values_page(facts: Facts) -> str:
    """The page of `kvkeep analyze values`; needs jinja2."""
    sections = [
        Section(
            title=f"Value {kind}",
            figures=_spread_figures(kind, facts["layers"], found),
            tables={},
        )
        for kind, found in facts["magnitudes"].items()
    ]
    rows = [
        (
            f"{one['one']} and {one['other']}",
            one["share"],
            one["chance"],
            f"{100 * one['share']:.0f} % (by chance {100 * one['chance']:.0f} %)",
        )
        for one in facts["overlaps"]
    ]
    sections.append(
        Section(
            title="Tables",
            figures={
                "Entries that two top sets share (mark: by chance)": (
                    draw.share_figure("Overlap of top sets", rows),
                    "",
                )
            },
            tables={
                "Do they name the same entries?": tables.overlap_table(facts),
                "Spread by layer": tables.spread_table(facts),
                "Along the text": tables.stretch_table(facts),
            },
            facts=_read(facts),
        )
    )
    return render(Page(title="Value ranges", sections=tuple(sections)), written="by reading a text")


def _spread_figures(kind: str, layers: list[int], found: Facts) -> dict[str, tuple[str, str]]:
    stretches = ["sinks", *(str(place + 1) for place in range(len(found["stretches_relative"])))]
    relative = [found["sinks_relative"], *found["stretches_relative"]]
    tails = [[head["tail"] for head in layer] for layer in found["heads"]]
    return {
        f"{kind} by layer: P1, quartiles, P99, largest": (
            draw.box_figure(f"{kind} by layer", [str(layer) for layer in layers], found["layers"], "layer"),
            "",
        ),
        f"{kind} along the text, over the middle of its head": (
            draw.box_figure(
                f"{kind} along the text", stretches, relative, "sinks, then sixteenths of the text"
            ),
            "",
        ),
        f"Tail (P99 / P50) of {kind} by layer and KV head": (
            draw.heat_figure(f"tail of {kind}", layers, tails, "KV heads, from the left"),
            "",
        ),
        f"Middle of {kind} by layer and sixteenth of the text": (
            draw.heat_figure(
                f"{kind} by stretch", layers, found["stretches_by_layer"], "sixteenths of the text"
            ),
            "",
        ),
    }


def quantization_page(facts: Facts) -> str:
    """The page of `kvkeep analyze quantization`; needs jinja2."""
    schemes, layers = facts["schemes"], facts["layers"]
    legend = {name: Mark(number) for number, name in enumerate(schemes)}
    figures = {}
    for name, words in (("pearson", "Pearson"), ("spearman", "Spearman")):
        lines = {key: [line[name] for line in found["layers"]] for key, found in schemes.items()}
        lowest = min(0.0, *(value for line in lines.values() for value in line))
        figures[f"{words} correlation of range and error by layer"] = (
            draw.line_figure(f"{words} by layer", "layer", layers, lines, lowest, 1.0),
            "policies",
        )
    rows = [
        (
            name,
            mean["shares"]["0.05"]["value"],
            mean["square_shares"]["0.05"]["value"],
            f"{100 * mean['shares']['0.05']['value']:.1f} % of the error",
        )
        for name, mean in ((name, found["mean"]) for name, found in schemes.items())
    ]
    figures["Error carried by the largest 5 % of ranges (mark: by their squares)"] = (
        draw.share_figure("Share of the error", rows),
        "",
    )
    for name, found in schemes.items():
        figures[f"{name}: error (first colour) and the law (second) by range"] = (
            draw.curve_figure(f"{name}: error against range", found["curve"]),
            "",
        )
    section = Section(
        title="Does the range of a value tell the error of few bits?",
        figures=figures,
        tables={"Means over layers": tables.link_table(facts), "By layer": tables.layer_link_table(facts)},
        facts=_read(facts),
        legend=legend,
    )
    return render(
        Page(title="Value range and quantization", sections=(section,)), written="by reading a text"
    )


def _read(facts: Facts) -> tuple[str, ...]:
    """How the numbers came about."""
    software = ", ".join(f"{name} {version}" for name, version in sorted(facts["versions"].items()))
    return (
        f"{sum(facts['portions'])} tokens of {facts['text']}, in {len(facts['portions'])} portions.",
        f"Model {facts['model']}, weights {facts['model_sha256'][:12]}….",
        f"Software: {software}.",
    )
