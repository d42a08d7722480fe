"""How many problems and samples a difference needs, before the machines are started."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvkeep.core.errors import ConfigError
from kvkeep.evaluation.extras import need
from kvkeep.evaluation.statistics.problem_means import ProblemMeans


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Where the noise of a paired difference comes from.

    Parameters
    ----------
    draw_variance
        Mean over problems of ``p (1 - p)``: luck of a single sample.
    effect_variance
        Variance over problems of the true difference, τ²: a policy that helps some and hurts others.
    """

    draw_variance: float
    effect_variance: float = 0.0

    def standard_error(self, problems: int, draws: int) -> float:
        """Of the mean difference, with so many problems and draws per arm."""
        if problems < 1 or draws < 1:
            raise ConfigError(f"{problems} problems with {draws} draws: give at least one of each.")
        return math.sqrt((self.effect_variance + 2 * self.draw_variance / draws) / problems)


# Without a pilot: difficulties as Beta(0.6, 0.6), many easy and many hard problems, and an even effect.
HARD_AND_EASY = Spread(draw_variance=0.6 * 0.6 / (1.2 * 2.2))


def pilot_spread(baseline: ProblemMeans, challenger: ProblemMeans | None = None) -> Spread:
    """Estimate the spread from a pilot.

    Parameters
    ----------
    baseline
        A run with at least two draws per problem: ``p (1 - p)`` is ``k/(k-1) m (1-m)`` on average.
    challenger
        A second run on the same problems: what its differences vary beyond the luck of the draws is
        the effect's own variance. Without it that variance is taken as zero, which is hopeful.

    Raises
    ------
    ConfigError
        If a problem has one draw only, or the problems differ.
    """
    runs = [baseline] if challenger is None else [baseline, challenger]
    if any(int(run.draws.min()) < 2 for run in runs):
        raise ConfigError("a pilot needs at least two draws per problem to see the luck of a draw.")
    noise = [run.draws / (run.draws - 1) * run.means * (1 - run.means) for run in runs]
    draw_variance = float(np.mean(noise))
    if challenger is None:
        return Spread(draw_variance=draw_variance)
    if baseline.ids != challenger.ids:
        raise ConfigError("the two runs of a pilot need the same problems.")
    luck = float(np.mean(noise[0] / baseline.draws + noise[1] / challenger.draws))
    observed = float(np.var(challenger.means - baseline.means, ddof=1))
    return Spread(draw_variance=draw_variance, effect_variance=max(0.0, observed - luck))


@dataclass(frozen=True, kw_only=True)
class Power:
    """What a study of this size can see.

    Parameters
    ----------
    n, draws
        Problems, and samples per problem and arm.
    difference
        True difference of the two accuracies.
    standard_error
        Of the measured difference.
    power
        Chance to find it significant.
    alpha
        Per cell: 0.05 divided by the cells of the family.
    smallest
        The difference that is found with 80 % power.
    """

    n: int
    draws: int
    difference: float
    standard_error: float
    power: float
    alpha: float
    smallest: float

    def __str__(self) -> str:
        return (
            f"{self.n} problems x {self.draws} samples: a true difference of "
            f"{100 * self.difference:.1f} pp is found with {100 * self.power:.0f} % power "
            f"at alpha {self.alpha:g}; {100 * self.smallest:.1f} pp with 80 %"
        )


def power(
    problems: int, draws: int, difference: float, spread: Spread, *, alpha: float = 0.05, cells: int = 1
) -> Power:
    """Chance that a two-sided test at ``alpha / cells`` finds a difference.

    By the normal approximation: a little hopeful below some 30 problems.

    Raises
    ------
    ConfigError
        If a number is out of range.
    """
    normal = _normal(difference, alpha, cells)
    per_cell, error = alpha / cells, spread.standard_error(problems, draws)
    critical = normal.ppf(1 - per_cell / 2)
    shift = abs(difference) / error if error else math.inf
    return Power(
        n=problems,
        draws=draws,
        difference=difference,
        standard_error=error,
        power=float(normal.sf(critical - shift) + normal.cdf(-critical - shift)),
        alpha=per_cell,
        smallest=float((critical + normal.ppf(0.8)) * error),
    )


def problems_needed(
    difference: float,
    draws: int,
    spread: Spread,
    *,
    alpha: float = 0.05,
    cells: int = 1,
    wanted: float = 0.8,
) -> int:
    """Fewest problems with which a difference is found with the wanted power.

    Raises
    ------
    ConfigError
        If a number is out of range.
    """
    normal = _normal(difference, alpha, cells)
    if difference == 0 or not 0 < wanted < 1:
        raise ConfigError("name a difference other than 0 and a power between 0 and 1.")
    reach = float(normal.ppf(1 - alpha / cells / 2) + normal.ppf(wanted))
    return max(2, math.ceil((reach * spread.standard_error(1, draws) / difference) ** 2))


def _normal(difference: float, alpha: float, cells: int) -> Any:
    if not (-1 <= difference <= 1 and 0 < alpha < 1 and cells >= 1):
        raise ConfigError(
            f"difference {difference}, alpha {alpha}, cells {cells}: a difference is a share "
            "(0.03 for 3 points), alpha lies in 0..1, and there is at least one cell."
        )
    return need("scipy.stats", extra="eval", purpose="a power estimate").norm
