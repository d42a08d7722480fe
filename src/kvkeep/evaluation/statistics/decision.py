"""From a family of comparisons to the branch that was agreed on beforehand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from kvkeep.core.errors import ConfigError
from kvkeep.evaluation.statistics.correction import Correction, corrected
from kvkeep.evaluation.statistics.paired import PairedDifference
from kvkeep.evaluation.statistics.problem_means import amount

Branch = Literal["A", "B", "C"]

# What each branch means unless a pre-registration words it.
BRANCHES: Mapping[str, str] = {
    "A": "claim the named cells",
    "B": "report as inconclusive, with intervals",
    "C": "reject the claim",
}


@dataclass(frozen=True, kw_only=True)
class CellDecision:
    """One comparison of the family.

    Parameters
    ----------
    cell
        Its name, for example ``"tiny-a/64"``.
    difference
        The comparison.
    adjusted_p
        Corrected for the family.
    verdict
        ``"better"`` or ``"worse"`` if significant after correction, else ``"undecided"``.
    """

    cell: str
    difference: PairedDifference
    adjusted_p: float
    verdict: Literal["better", "worse", "undecided"]


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The outcome of a family.

    Parameters
    ----------
    branch
        ``"A"``: at least one cell better, none worse. ``"C"``: any cell worse. ``"B"``: neither.
    sentence
        The outcome in words.
    cells
        In the order given.
    correction, alpha
        How the family's error was held, and at what.
    """

    branch: Branch
    sentence: str
    cells: tuple[CellDecision, ...]
    correction: Correction
    alpha: float


def decide(
    differences: Mapping[str, PairedDifference],
    *,
    correction: Correction = "holm",
    alpha: float = 0.05,
    branches: Mapping[str, str] = BRANCHES,
) -> Decision:
    """Correct the p values of a family, name the branch and say it.

    Parameters
    ----------
    differences
        One per cell.
    branches
        What follows from each branch, in the words of the study.

    Raises
    ------
    ConfigError
        If there is no cell, or α is outside 0..1, or a branch has no words.
    """
    if not 0 < alpha < 1 or set(BRANCHES) - set(branches):
        raise ConfigError(f"alpha {alpha} must be in 0..1 and branches {sorted(BRANCHES)} need words.")
    adjusted = corrected({cell: each.p for cell, each in differences.items()}, correction)
    cells = tuple(
        CellDecision(
            cell=cell,
            difference=each,
            adjusted_p=adjusted[cell],
            verdict="undecided"
            if adjusted[cell] >= alpha or each.estimate == 0
            else ("better" if each.estimate > 0 else "worse"),
        )
        for cell, each in differences.items()
    )
    better, worse = ([cell for cell in cells if cell.verdict == verdict] for verdict in ("better", "worse"))
    branch: Branch = "C" if worse else "A" if better else "B"
    method = "no correction" if correction == "none" else f"{correction.capitalize()} correction"
    named = better + worse
    sentence = (
        f"Branch {branch}: {len(better)} of {len(cells)} cells better and {len(worse)} worse after "
        f"{method} at {alpha:g}{': ' + ', '.join(map(_words, named)) if named else ''}. "
        f"What follows: {branches[branch]}."
    )
    return Decision(branch=branch, sentence=sentence, cells=cells, correction=correction, alpha=alpha)


def _words(cell: CellDecision) -> str:
    difference = amount(cell.difference.metric, cell.difference.estimate)
    return f"{cell.cell} {difference} (p = {cell.adjusted_p:.4f})"
