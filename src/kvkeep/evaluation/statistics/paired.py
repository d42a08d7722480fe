"""The difference between two runs on the same problems."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvkeep.core.errors import ConfigError
from kvkeep.evaluation.statistics.problem_means import ProblemMeans, amount, cluster_sums
from kvkeep.evaluation.statistics.resampling import bootstrap_means, bootstrap_p, sign_flip_p

Test = Literal["bootstrap", "sign-flip"]

# The percentile bootstrap rejects too often on fewer clusters than this (twice the nominal rate at 30).
FEW_CLUSTERS = 60


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """Challenger minus baseline, problem by problem.

    Parameters
    ----------
    metric
        What was compared.
    n, clusters
        Problems, and clusters that were resampled.
    baseline, challenger
        The two means.
    estimate, standard_error
        Mean difference, and the standard deviation of its bootstrap distribution.
    interval, level
        Percentile interval of the bootstrap.
    family_interval, family_level
        The wider interval that holds for all cells of a family together (Bonferroni).
    p, test
        The two-sided p that counts, and the test it comes from.
    p_bootstrap, p_sign_flip
        Both tests.
    better, worse, equal
        Problems on which the challenger did better, did worse, did the same.
    resamples
        Of either test.
    """

    metric: str
    n: int
    clusters: int
    baseline: float
    challenger: float
    estimate: float
    standard_error: float
    interval: tuple[float, float]
    level: float
    family_interval: tuple[float, float]
    family_level: float
    p: float
    test: Test
    p_bootstrap: float
    p_sign_flip: float
    better: int
    worse: int
    equal: int
    resamples: int

    def __str__(self) -> str:
        estimate, low, high = (amount(self.metric, value) for value in (self.estimate, *self.interval))
        return (
            f"{self.metric}: {estimate} [{low}, {high}], "
            f"p = {self.p:.4f} ({self.test}), {self.n} problems: "
            f"{self.better} better, {self.worse} worse, {self.equal} equal"
        )


def paired_difference(
    baseline: ProblemMeans,
    challenger: ProblemMeans,
    *,
    rng: np.random.Generator,
    metric: str = "accuracy",
    resamples: int = 10_000,
    level: float = 0.95,
    cells: int = 1,
    test: Test | None = None,
) -> PairedDifference:
    """Compare two runs on the same problems.

    Parameters
    ----------
    baseline, challenger
        One number per problem, of the same problems.
    rng
        Source of the resamples: the same state gives the same numbers.
    metric
        Name for the result.
    resamples, level
        Of bootstrap and sign-flip; of the interval.
    cells
        Number of comparisons in the family: sets the wider interval, not ``p``
        (see :mod:`kvkeep.evaluation.statistics.correction`).
    test
        Which test gives ``p``. ``None`` is the sign-flip below 60 clusters, the bootstrap from there.

    Raises
    ------
    ConfigError
        If the problems differ or are fewer than two.
    """
    return paired_average(
        [(baseline, challenger)],
        rng=rng,
        metric=metric,
        resamples=resamples,
        level=level,
        cells=cells,
        test=test,
    )


def paired_average(
    tasks: Sequence[tuple[ProblemMeans, ProblemMeans]],
    *,
    rng: np.random.Generator,
    metric: str = "accuracy",
    resamples: int = 10_000,
    level: float = 0.95,
    cells: int = 1,
    test: Test | None = None,
) -> PairedDifference:
    """Compare two policies over several tasks at once: the mean of the tasks' differences.

    Every task has the same weight, and problems are resampled within their task. Parameters and errors
    are those of :func:`paired_difference`; ``tasks`` holds a pair (baseline, challenger) for each.
    """
    if not tasks or cells < 1 or not 0 < level < 1:
        raise ConfigError(
            f"{len(tasks)} tasks, {cells} cells, level {level}: give at least one, and 0 < level < 1."
        )
    differences = [_differences(*pair) for pair in tasks]
    strata = [cluster_sums(each, pair[0].groups) for each, pair in zip(differences, tasks, strict=True)]
    distribution = np.mean(
        [bootstrap_means(sums, sizes, resamples=resamples, rng=rng) for sums, sizes in strata], axis=0
    )
    shares = np.concatenate([sums / sizes.sum() / len(tasks) for sums, sizes in strata])
    by_bootstrap = float(bootstrap_p(distribution))
    by_flip = float(sign_flip_p(shares, resamples=resamples, rng=rng))
    if test is None:
        test = "sign-flip" if len(shares) < FEW_CLUSTERS else "bootstrap"
    every, family = np.concatenate(differences), 1 - (1 - level) / cells
    return PairedDifference(
        metric=metric,
        n=len(every),
        clusters=len(shares),
        baseline=float(np.mean([np.mean(pair[0].means) for pair in tasks])),
        challenger=float(np.mean([np.mean(pair[1].means) for pair in tasks])),
        estimate=float(np.mean([np.mean(each) for each in differences])),
        standard_error=float(distribution.std(ddof=1)),
        interval=_percentiles(distribution, level),
        level=level,
        family_interval=_percentiles(distribution, family),
        family_level=family,
        p=by_flip if test == "sign-flip" else by_bootstrap,
        test=test,
        p_bootstrap=by_bootstrap,
        p_sign_flip=by_flip,
        better=int((every > 0).sum()),
        worse=int((every < 0).sum()),
        equal=int((every == 0).sum()),
        resamples=resamples,
    )


def _differences(baseline: ProblemMeans, challenger: ProblemMeans) -> np.ndarray:
    if baseline.ids != challenger.ids or baseline.groups != challenger.groups:
        only = set(baseline.ids) ^ set(challenger.ids)
        raise ConfigError(
            "a paired comparison needs the same problems (and clusters) in both runs; "
            f"{len(only)} problems are in one only."
        )
    return challenger.means - baseline.means


def _percentiles(distribution: np.ndarray, level: float) -> tuple[float, float]:
    low, high = np.quantile(distribution, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
