"""Tables of `kvkeep analyze values` and `quantization`, from the facts that ``--json`` prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvkeep.evaluation.report.tables import Table

Facts = Mapping[str, Any]


def spread_table(facts: Facts) -> Table:
    """One line a layer: middle, 99th percentile and tail of each magnitude, middle of the sinks."""
    columns = ["layer"]
    for kind in facts["magnitudes"]:
        columns += [f"{kind} P50", "P99", "tail", "sinks"]
    rows = []
    for place, layer in enumerate(facts["layers"]):
        cells = [str(layer)]
        for found in facts["magnitudes"].values():
            line = found["layers"][place]
            cells += [number(line[name]) for name in ("p50", "p99")]
            cells += [f"{line['tail']:.2f}", number(line["sinks"])]
        rows.append(tuple(cells))
    return Table(
        columns=tuple(columns),
        rows=tuple(rows),
        note=f"tail: P99 / P50. sinks: middle of the first {facts['sinks']} positions, left out elsewhere.",
    )


def stretch_table(facts: Facts) -> Table:
    """Sinks and the sixteen stretches: each magnitude over the middle of its head."""
    columns = ["stretch"]
    for kind in facts["magnitudes"]:
        columns += [f"{kind} P50", "P99"]
    lines = [("sinks", [found["sinks_relative"] for found in facts["magnitudes"].values()])]
    stretches = zip(*(found["stretches_relative"] for found in facts["magnitudes"].values()), strict=True)
    lines += [(str(place), list(found)) for place, found in enumerate(stretches, 1) if found[0]]
    return Table(
        columns=tuple(columns),
        rows=tuple(
            (name, *(f"{one[each]:.2f}" for one in found for each in ("p50", "p99"))) for name, found in lines
        ),
        note="Every entry is divided by the middle of its layer and head. 1 to 16: sixteenths of the text.",
    )


def overlap_table(facts: Facts) -> Table:
    """One line a pair of rankings."""
    rows = [
        (
            f"{one['one']}, {one['other']}",
            f"{100 * one['share']:.1f}",
            span(one["interval"], 100, 1),
            f"{100 * one['chance']:.1f}",
            f"{one['jaccard']:.3f}",
        )
        for one in facts["overlaps"]
    ]
    counts = sorted({count for one in facts["overlaps"] for count in one["entries"]})
    return Table(
        columns=("top sets by", "shared, %", "95 %", "by chance, %", "Jaccard"),
        rows=tuple(rows),
        note=f"Top {' or '.join(map(str, counts))} entries of a head, without the sinks and the newest "
        f"{' or '.join(map(str, sorted(set(facts['recent']))))}; means over layers and KV heads, intervals "
        "by resampling them. attention: mean of the last queries.",
    )


def link_table(facts: Facts) -> Table:
    """One line a scheme, means over layers."""
    rows = []
    for name, found in facts["schemes"].items():
        mean = found["mean"]
        carried = [
            f"{100 * mean['shares'][top]['value']:.1f} ({100 * mean['square_shares'][top]['value']:.1f})"
            for top in mean["shares"]
        ]
        rows.append(
            (
                name,
                f"{found['bits_per_channel']:g}",
                f"{100 * found['noise']:.3g}",
                *(valued(mean[each]) for each in ("pearson", "spearman", "spearman_norm", "slope")),
                f"{mean['over_law']['value']:.2f}",
                *carried,
            )
        )
    tops = [f"top {100 * float(top):g} %" for top in next(iter(facts["schemes"].values()))["mean"]["shares"]]
    return Table(
        columns=(
            "scheme",
            "bits",
            "noise, %",
            "Pearson",
            "Spearman",
            "of the norm",
            "slope",
            "over law",
            *tops,
        ),
        rows=tuple(rows),
        note="Range of a value against the mean square error of its round trip, all heads and tokens of a "
        "layer together; intervals by resampling layers. of the norm: Spearman of L2 norm and error. "
        "bits: of a channel, scale and zero included. noise: error over the values' mean square. "
        "slope: of log error on log range; 2 is the quadratic law. over law: error over R^2 / (12 "
        "(2^b - 1)^2) of the groups. top: share of the whole error carried by the largest ranges; in "
        "brackets what their squares have.",
    )


def layer_link_table(facts: Facts) -> Table:
    """One line a layer, Pearson and Spearman of every scheme."""
    schemes = facts["schemes"]
    return Table(
        columns=("layer", *schemes),
        rows=tuple(
            (
                str(layer),
                *(
                    f"{found['layers'][place]['pearson']:.2f} / {found['layers'][place]['spearman']:.2f}"
                    for found in schemes.values()
                ),
            )
            for place, layer in enumerate(facts["layers"])
        ),
        note=f"{sum(facts['portions'])} tokens, the first {facts['sinks_dropped']} of each portion dropped.",
    )


def number(value: float) -> str:
    """Three significant digits."""
    return f"{value:.3g}"


def valued(mean: Mapping[str, Any]) -> str:
    """A mean with its interval."""
    return f"{mean['value']:.2f}" + (f" {span(mean['interval'], 1, 2)}" if mean["interval"] else "")


def span(interval: list[float] | None, scale: float, digits: int) -> str:
    """An interval in brackets."""
    if interval is None:
        return "–"
    return f"[{scale * interval[0]:.{digits}f}, {scale * interval[1]:.{digits}f}]"
