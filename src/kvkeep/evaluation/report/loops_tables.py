"""Tables of `kvkeep analyze loops`, from the facts that ``--json`` prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvkeep.evaluation.report.tables import Table
from kvkeep.evaluation.report.values_tables import span

Facts = Mapping[str, Any]


def class_table(facts: Facts) -> Table:
    """One line an arm: classes, loops with interval and difference, repetition."""
    rows = []
    for name, arm in facts["arms"].items():
        loops, found = arm["loops"], arm["difference"]
        rows.append(
            (
                name,
                str(arm["texts"]),
                f"{arm['mean_cache']:.1f}",
                *(str(count) for count in arm["classes"].values()),
                f"{100 * loops['share']:.1f} {span(loops['interval'], 100, 1)}",
                "–"
                if found is None
                else f"{100 * found['estimate']:+.1f} {span(found['interval'], 100, 1)}, p {found['p']:.3g}",
                valued(arm["novelty_min"], 2),
                valued(arm["zlib_tail"], 2),
                f"{arm['tokens']:.0f}",
                str(arm["at_limit"]),
            )
        )
    classes = next(iter(facts["arms"].values()))["classes"]
    return Table(
        columns=(
            "run", "texts", "mean cache", *(name.replace("_", " ") for name in classes), "loops, %",
            f"more than {facts['beside']}, points", "new 8-grams", "zlib", "tokens", "at the limit",
        ),
        rows=tuple(rows),
        note="loops: phrase loops, and texts that were cut off in a cycle of tokens. Intervals of 95 %: "
        "Wilson's or Student's over problems; differences are paired, with a sign-flip test below 60 "
        "problems. new 8-grams: least share in a window of 512 tokens. zlib: compressed size of a "
        "text's end over its size.",
    )  # fmt: skip


def before_table(facts: Facts) -> Table:
    """One line an arm: what the evictions took before loops, earlier, and in texts that did not loop."""
    rows = []
    for name, arm in facts["arms"].items():
        found = arm["evicted"]
        if found is None:
            continue
        cells = [name, str(found["texts"])]
        for feature in ("range", "large_lost"):
            cells += [valued(found[part][feature], 2) for part in ("before", "earlier", "change", "rest")]
        cells += [
            valued(found["before"][feature], 0 if feature == "age" else 2)
            for feature in ("age", "prompt", "sinks")
        ]
        rows.append((*cells, valued(found["gap"], 1), valued(found["gap_change"], 1)))
    parts = ("before", "earlier", "change", "no loop")
    return Table(
        columns=(
            "run", "loops", *(f"place, {part}" for part in parts), *(f"large lost, {part}" for part in parts),
            "age", "prompt", "sinks", "gap", "gap, more than by chance",
        ),
        rows=tuple(rows),
        note=f"before: the last {facts['before']} evictions whose effect can show where the loop begins; "
        "earlier: all others of the same text before it; change: before minus earlier, text by text; "
        "no loop: all evictions of texts that did not loop. place: of the range of what goes among "
        "the candidates of its head, 0 smallest, 1 largest, 0.5 on average for a random choice. large"
        " lost: share of the largest tenth that goes. age (tokens), prompt and sinks (shares): of "
        "what goes before a loop. gap: tokens from the last eviction to the start, and how much more "
        "than from the last eviction to any token before it.",
    )  # fmt: skip


def loop_table(facts: Facts) -> Table:
    """Every loop."""
    rows = []
    for one in facts["loops"]:
        found = one["before"]
        rows.append(
            (
                f"{one['arm']}: {one['id']}, draw {one['draw']}",
                *(
                    "–" if one[name] is None else str(one[name])
                    for name in ("start", "period", "tokens", "gap")
                ),
                *(
                    "–" if found is None else f"{found[name]:.{digits}f}"
                    for name, digits in (("range", 2), ("large_lost", 2), ("age", 0), ("prompt", 2))
                ),
            )
        )
    return Table(
        columns=("text", "start", "period", "tokens", "gap", "place", "large lost", "age", "prompt"),
        rows=tuple(rows),
        note="start: first token that repeats; period: length of the cycle in tokens; both – where a "
        "phrase loop does not last to the end.",
    )


def valued(mean: Mapping[str, Any] | None, digits: int) -> str:
    """A mean with its interval; a dash for nothing."""
    if mean is None:
        return "–"
    interval = f" {span(mean['interval'], 1, digits)}" if mean["interval"] else ""
    return f"{mean['value']:.{digits}f}{interval}"
