"""A page of figures and tables that is not about accuracies of runs, in the style of a report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvkeep.evaluation.report.figures import Mark
from kvkeep.evaluation.report.tables import Table


@dataclass(frozen=True, kw_only=True)
class Section:
    """Figures and tables under one heading; see :class:`kvkeep.evaluation.report.page.Section`.

    Parameters
    ----------
    figures
        By their heading: the drawing, and a class of its legend.
    facts
        How the numbers came about, one sentence each.
    """

    title: str
    figures: Mapping[str, tuple[str, str]]
    tables: Mapping[str, Table]
    facts: tuple[str, ...] = ()
    legend: Mapping[str, Mark] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Page:
    """What the template asks of a report."""

    title: str
    sections: tuple[Section, ...]
    decision: None = None
