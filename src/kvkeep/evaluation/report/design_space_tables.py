"""The tables of the design-space study."""

from __future__ import annotations

from collections.abc import Sequence

from kvkeep.evaluation.design_space.diagnostics import Evidence
from kvkeep.evaluation.design_space.result import Result, Row
from kvkeep.evaluation.report.tables import Table
from kvkeep.evaluation.statistics.paired import PairedDifference

_MARKS = {True: "**found**", False: "no", None: "–"}


def gains_table(result: Result) -> Table:
    """Screening and strict protocol side by side, a mechanism a row."""
    models = result.settings.models if result.family is not None else ()
    columns = ["mechanism", "family", "screening", "its cache"]
    for model in models:
        columns += [f"strict, {model}", "p", "cache"]
    columns += ["verdict"]
    return Table(
        columns=tuple(columns),
        rows=tuple(_row(row) for row in result.rows),
        note=_note(result),
    )


def _row(row: Row) -> tuple[str, ...]:
    cells = [
        row.mechanism.name,
        row.mechanism.family,
        _gain(row.screening.difference),
        _percent(row.screening.memory_ratio),
    ]
    if row.evidence is None:
        return (*cells, "promising" if row.promising else "dropped")
    for cell, comparison in row.evidence.confirmed.values():
        cells += [_gain(cell.difference), f"{cell.adjusted_p:.4f}", _percent(comparison.memory_ratio)]
    return (*cells, _verdict(row, row.evidence))


def _verdict(row: Row, evidence: Evidence) -> str:
    if evidence.verdict == "better":
        return "better"
    return f"{evidence.verdict}: evaporates" if row.promising else evidence.verdict


def _note(result: Result) -> str:
    settings = result.settings
    policy = f"{settings.base}, {settings.entries} entries, prompt {settings.prompt}"
    screening = (
        f"Base: {policy}. Differences in points against it, with 95 % intervals; cache: mean memory relative "
        "to the base's, bytes of keys and values as a model in 16 bits holds them. Screening: "
        f"{settings.screened} dev problems, 1 draw, {settings.models[0]}, equal budgets, "
        "nothing matched but the end of the prompt, no correction."
        f"{_few_bits(result)}"
    )
    if result.family is None:
        return f"{screening} Promising: a difference above 0, whatever its interval."
    seal = (result.family.preregistration or "")[:12]
    return (
        f"{screening} Strict: {settings.problems} held-out problems x {settings.draws}, mean memory matched "
        f"on dev problems within {100 * settings.tolerance:g} %, plan sealed first ({seal}), p by Holm over "
        f"all {len(result.family.decision.cells)} comparisons. A mechanism evaporates if its screening is "
        "above 0 and the strict protocol does not find it better."
    )


def _few_bits(result: Result) -> str:
    """What an equal budget of the screening means where entries are in few bits."""
    named = [each.name for each in result.settings.mechanisms if each.precision is not None]
    if not named:
        return ""
    return (
        f" For {', '.join(named)} an equal budget is as many bits by the name of the width, scales "
        f"forgotten: those of {result.settings.entries} entries in 16 bits."
    )


def diagnostics_table(result: Result) -> Table:
    """The six failure modes, a mechanism a row."""
    rows = [row for row in result.rows if row.findings]
    names = [finding.name for finding in rows[0].findings] if rows else []
    return Table(
        columns=("mechanism", *names),
        rows=tuple(
            (row.mechanism.name, *(_MARKS[finding.present] for finding in row.findings)) for row in rows
        ),
    )


def reasons(result: Result) -> list[str]:
    """What was found, with its numbers, one line each."""
    return [
        f"{row.mechanism.name}, {finding.name}: {finding.why}."
        for row in result.rows
        for finding in row.findings
        if finding.present
    ]


def outcome(result: Result) -> str:
    """Which gains are left."""
    judged = [(row.mechanism.name, row.evidence.verdict) for row in result.rows if row.evidence is not None]
    better, worse = (
        _counted([name for name, found in judged if found == verdict]) for verdict in ("better", "worse")
    )
    return (
        f"{better} of {len(result.rows)} mechanisms are better and {worse} worse under the strict protocol; "
        f"{_counted(result.evaporated)} evaporated."
    )


def _counted(names: Sequence[str]) -> str:
    return f"{len(names)} ({', '.join(names)})" if names else "0"


def mechanisms_table(result: Result) -> Table:
    """What each mechanism does, and how to switch it on."""
    return Table(
        columns=("mechanism", "what it does", "switch"),
        rows=tuple((each.name, each.does, each.switch) for each in result.settings.mechanisms),
    )


def _gain(difference: PairedDifference) -> str:
    low, high = difference.interval
    return f"{100 * difference.estimate:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.1f} %"
