"""What the study found: one row a mechanism, screening and strict protocol side by side."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvkeep.evaluation.comparison import Comparison
from kvkeep.evaluation.design_space.diagnostics import Evidence, Finding, diagnose
from kvkeep.evaluation.design_space.mechanisms import Mechanism
from kvkeep.evaluation.design_space.proxy import change
from kvkeep.evaluation.design_space.stages import Settings, Stages
from kvkeep.evaluation.study import Family


@dataclass(frozen=True, kw_only=True)
class Row:
    """One mechanism.

    Parameters
    ----------
    mechanism
        What it is.
    screening
        The cheap look.
    evidence, findings
        The strict protocol and the six diagnostics; ``None`` and empty after a screening alone.
    """

    mechanism: Mechanism
    screening: Comparison
    evidence: Evidence | None = None
    findings: tuple[Finding, ...] = ()

    @property
    def promising(self) -> bool:
        """Whether someone who stops at the screening would go on with it."""
        return self.screening.difference.estimate > 0

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            **asdict(self),
            "promising": self.promising,
            "verdict": None if self.evidence is None else self.evidence.verdict,
        }


@dataclass(frozen=True, kw_only=True)
class Result:
    """All rows.

    Parameters
    ----------
    settings
        Of the study.
    rows
        In the order of the mechanisms.
    family
        The confirmed study; ``None`` after a screening alone.
    """

    settings: Settings
    rows: tuple[Row, ...]
    family: Family | None = None

    @property
    def evaporated(self) -> tuple[str, ...]:
        """Mechanisms that looked promising and were not confirmed to be better."""
        return tuple(
            row.mechanism.name
            for row in self.rows
            if row.promising and row.evidence is not None and row.evidence.verdict != "better"
        )

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        settings = asdict(self.settings)
        return {
            "settings": settings,
            "rows": [row.as_dict() for row in self.rows],
            "evaporated": list(self.evaporated),
            "decision": None if self.family is None else asdict(self.family.decision),
            "preregistration": None if self.family is None else self.family.preregistration,
        }


def screening(stages: Stages) -> Result:
    """Screen, and no more."""
    found = stages.screen()
    mechanisms = stages.settings.mechanisms
    rows = [Row(mechanism=each, screening=found[each.name]) for each in mechanisms]
    return Result(settings=stages.settings, rows=tuple(rows))


def whole(stages: Stages) -> Result:
    """Screen, match, seal and confirm every mechanism, whatever its screening said."""
    stages.check_sealed()
    screened = stages.screen()
    pairs = stages.match()
    dev, nats = stages.dev(pairs), stages.nats(pairs)
    study = stages.seal(pairs)
    family = stages.confirm(study, pairs)
    decisions = {cell.cell: cell for cell in family.decision.cells}
    rows = []
    for mechanism in stages.settings.mechanisms:
        name = mechanism.name
        evidence = Evidence(
            screening=screened[name],
            dev=dev[name],
            confirmed={
                cell.model: (decisions[cell.name], family.comparisons[cell.name])
                for cell in study.cells
                if cell.arm == name
            },
            nats=change(nats[name]) if name in nats else None,
        )
        rows.append(
            Row(
                mechanism=mechanism,
                screening=screened[name],
                evidence=evidence,
                findings=diagnose(evidence),
            )
        )
    return Result(settings=stages.settings, rows=tuple(rows), family=family)
