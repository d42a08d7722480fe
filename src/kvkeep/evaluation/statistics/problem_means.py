"""From samples to one number per problem: the unit that every statistic here works on.

Several draws of one problem are not independent observations. Averaging them first leaves one number
per problem whose spread already contains the luck of the draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from kvkeep.core.errors import ConfigError, UnknownNameError
from kvkeep.evaluation.loops import metric as loop
from kvkeep.evaluation.records import SampleRecord

METRICS: Mapping[str, Callable[[SampleRecord], float]] = {
    "accuracy": lambda sample: float(sample.correct),
    "score": lambda sample: float(sample.score),
    "not_extracted": lambda sample: float(sample.answer_class == "not_extracted"),
    "timed_out": lambda sample: float(sample.answer_class == "timed_out"),
    "truncated": lambda sample: float(sample.failure_class == "truncated"),
    "loop": loop,
    "phrase_loop": lambda sample: float(sample.failure_class == "phrase_loop"),
    "garbage": lambda sample: float(sample.failure_class == "garbage"),
    "tokens": lambda sample: float(sample.tokens),
}


def amount(metric: str, value: float) -> str:
    """A difference in words: percentage points, or a plain number for lengths."""
    return f"{value:+.1f}" if metric == "tokens" else f"{100 * value:+.2f} pp"


@dataclass(frozen=True, kw_only=True, eq=False)
class ProblemMeans:
    """One number per problem.

    Parameters
    ----------
    ids, groups
        Problems in ascending order, and the cluster of each.
    means
        Mean of the metric over the draws, float64 ``[problems]``.
    draws
        Number of draws, int64 ``[problems]``.
    first
        The metric on the draw with the lowest number, float64 ``[problems]``.
    share
        Whether the metric lies between 0 and 1 by what it is.
    """

    ids: tuple[str, ...]
    groups: tuple[str, ...]
    means: np.ndarray
    draws: np.ndarray
    first: np.ndarray
    share: bool = False

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def label(self) -> str:
        """``"avg@3"``, or ``"avg@2-3"`` if problems have different numbers of draws."""
        low, high = int(self.draws.min()), int(self.draws.max())
        return f"avg@{low}" if low == high else f"avg@{low}-{high}"

    def only(self, ids: Iterable[str]) -> ProblemMeans:
        """The same for some of the problems."""
        wanted = set(ids)
        index = [place for place, name in enumerate(self.ids) if name in wanted]
        return ProblemMeans(
            ids=tuple(self.ids[place] for place in index),
            groups=tuple(self.groups[place] for place in index),
            means=self.means[index],
            draws=self.draws[index],
            first=self.first[index],
            share=self.share,
        )


def problem_means(samples: Iterable[SampleRecord], metric: str = "accuracy") -> ProblemMeans:
    """Average a metric over the draws of each problem.

    Parameters
    ----------
    samples
        In any order.
    metric
        A key of :data:`METRICS`.

    Raises
    ------
    UnknownNameError
        If the metric is unknown.
    ConfigError
        If there is no sample, or if the draws of one problem name different clusters.
    """
    if metric not in METRICS:
        raise UnknownNameError("metric", metric, METRICS)
    value = METRICS[metric]
    ordered = sorted(samples, key=lambda sample: sample.key)
    if not ordered:
        raise ConfigError("no samples were given: there is nothing to average.")
    by_id: dict[str, list[SampleRecord]] = {}
    for sample in ordered:
        by_id.setdefault(sample.id, []).append(sample)
    for name, draws in by_id.items():
        if len({sample.group for sample in draws}) > 1:
            raise ConfigError(f"the draws of problem {name!r} name different clusters: a problem has one.")
    return ProblemMeans(
        ids=tuple(by_id),
        groups=tuple(draws[0].group for draws in by_id.values()),
        means=np.array([np.mean([value(sample) for sample in draws]) for draws in by_id.values()]),
        draws=np.array([len(draws) for draws in by_id.values()]),
        first=np.array([value(draws[0]) for draws in by_id.values()]),
        share=metric != "tokens",
    )


def cluster_sums(values: np.ndarray, groups: Iterable[str]) -> tuple[np.ndarray, np.ndarray]:
    """Sum of the values in each cluster, and its size, both float64 ``[clusters]``."""
    _, index = np.unique(np.array(list(groups)), return_inverse=True)
    return np.bincount(index, weights=values), np.bincount(index).astype(np.float64)
