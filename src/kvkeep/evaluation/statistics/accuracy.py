"""Accuracy of one run with its interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvkeep.core.errors import ConfigError
from kvkeep.evaluation.extras import need
from kvkeep.evaluation.grading.exact import as_number, as_words, normalise
from kvkeep.evaluation.records import SampleRecord
from kvkeep.evaluation.statistics.problem_means import ProblemMeans, cluster_sums, problem_means
from kvkeep.evaluation.statistics.share_interval import share_interval

# Below this many problems, or this close to 0 or 1, a symmetric interval is not to be trusted alone.
FEW_PROBLEMS = 60
NEAR_EDGE = 0.1


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """A mean over problems.

    Parameters
    ----------
    metric
        ``"avg@3"``, ``"pass@3"`` or ``"maj@3"``.
    n, clusters, draws
        Problems; clusters (fewer if problems belong together); samples in all.
    estimate, standard_error
        Mean over problems, in 0..1 for accuracies, and its standard error over clusters.
    interval, level
        Of a metric between 0 and 1 Wilson's form of Student's t interval over clusters, which stays there
        (:func:`~kvkeep.evaluation.statistics.share_interval.share_interval`); of others Student's.
    wilson
        Wilson's interval on the first draw of each problem, given where an interval from few numbers is weak:
        few problems, or an estimate near 0 or 1. ``None`` otherwise.
    """

    metric: str
    n: int
    clusters: int
    draws: int
    estimate: float
    standard_error: float
    interval: tuple[float, float]
    level: float
    wilson: tuple[float, float] | None = None

    def __str__(self) -> str:
        low, high = self.interval
        text = (
            f"{self.metric} {100 * self.estimate:.1f} % [{100 * low:.1f}, {100 * high:.1f}], "
            f"{self.n} problems, {self.draws} samples"
        )
        if self.wilson is not None:
            text += f" (Wilson on first draws [{100 * self.wilson[0]:.1f}, {100 * self.wilson[1]:.1f}])"
        return text


def accuracy(problems: ProblemMeans, *, level: float = 0.95) -> Accuracy:
    """avg@k: the mean over problems of the mean over their draws.

    Its expectation is the chance of a single sample to be correct, whatever the number of draws. The
    standard error comes from the spread between problems, which contains the luck of the draws;
    the spread between whole runs would miss the choice of problems and come out far too small.

    Raises
    ------
    ConfigError
        If fewer than two clusters leave no spread to measure.
    """
    mean = _mean(problems.label, problems, problems.means, level)
    binary = bool(np.isin(problems.first, (0.0, 1.0)).all())
    weak = len(problems) < FEW_PROBLEMS or not NEAR_EDGE <= mean.estimate <= 1 - NEAR_EDGE
    if not (binary and weak):
        return mean
    proportion = need("statsmodels.stats.proportion", extra="eval", purpose="Wilson's interval")
    low, high = proportion.proportion_confint(
        int(problems.first.sum()), len(problems), alpha=1 - level, method="wilson"
    )
    return Accuracy(**{**vars(mean), "wilson": (float(low), float(high))})


def pass_at(problems: ProblemMeans, k: int, *, level: float = 0.95) -> Accuracy:
    """pass@k: the chance that at least one of ``k`` samples is correct, without bias from ``n >= k``.

    ``1 - C(n - c, k) / C(n, k)`` for ``c`` correct of ``n`` draws, averaged over problems.

    Source
    ------
    Chen et al., arXiv 2107.03374, equation 1.

    Raises
    ------
    ConfigError
        If a problem has fewer than ``k`` draws.
    """
    if not 1 <= k <= int(problems.draws.min()):
        fewest = int(problems.draws.min())
        raise ConfigError(f"pass@{k} needs 1 <= k <= {fewest}, the fewest draws of a problem.")
    comb = need("scipy.special", extra="eval", purpose="pass@k").comb
    correct = np.rint(problems.means * problems.draws)
    values = 1 - comb(problems.draws - correct, k) / comb(problems.draws, k)
    return _mean(f"pass@{k}", problems, values, level)


def majority_at(samples: Sequence[SampleRecord], k: int, *, level: float = 0.95) -> Accuracy:
    """maj@k: the share of problems whose most frequent answer among the first ``k`` samples is correct.

    Samples without an answer do not vote; of answers that are as frequent, the one that came first counts.
    Answers are the same if they are the same number, the same words, or the same text.

    Source
    ------
    Wang et al., "Self-consistency improves chain of thought reasoning", arXiv 2203.11171.

    Raises
    ------
    ConfigError
        If a problem has fewer than ``k`` draws.
    """
    problems = problem_means(samples)
    if not 1 <= k <= int(problems.draws.min()):
        fewest = int(problems.draws.min())
        raise ConfigError(f"maj@{k} needs 1 <= k <= {fewest}, the fewest draws of a problem.")
    votes: dict[str, list[SampleRecord]] = {name: [] for name in problems.ids}
    for sample in sorted(samples, key=lambda each: each.key):
        votes[sample.id].append(sample)
    values = np.array([float(_vote(votes[name][:k])) for name in problems.ids])
    return _mean(f"maj@{k}", problems, values, level)


def _vote(samples: Sequence[SampleRecord]) -> bool:
    """Whether the answer that most of the samples give is correct."""
    groups: dict[object, list[bool]] = {}
    for sample in samples:
        answer = sample.extra.get("extracted")
        if answer is not None:
            groups.setdefault(_meaning(str(answer)), []).append(sample.correct)
    # max returns the first of equals, and a dictionary keeps the order of arrival.
    return max(groups.values(), key=len)[0] if groups else False


def _meaning(answer: str) -> object:
    number, words = as_number(answer), as_words(answer)
    return number if number is not None else words if words is not None else normalise(answer)


def _mean(metric: str, problems: ProblemMeans, values: np.ndarray, level: float) -> Accuracy:
    sums, sizes = cluster_sums(values, problems.groups)
    count = len(sums)
    if count < 2:
        raise ConfigError("an interval needs at least two problems (or clusters): one has no spread.")
    estimate = float(sums.sum() / sizes.sum())
    residuals = sums - estimate * sizes
    error = math.sqrt(count / (count - 1) * float(residuals @ residuals)) / float(sizes.sum())
    student = need("scipy.stats", extra="eval", purpose="an interval").t
    quantile = float(student.ppf((1 + level) / 2, count - 1))
    interval = (estimate - quantile * error, estimate + quantile * error)
    if problems.share:
        interval = share_interval(min(max(estimate, 0.0), 1.0), error, count, quantile)
    return Accuracy(
        metric=metric,
        n=len(problems),
        clusters=count,
        draws=int(problems.draws.sum()),
        estimate=estimate,
        standard_error=error,
        interval=interval,
        level=level,
    )
