"""From windows to figures: nats per token with an interval over windows, by depth, and against a baseline.

Tokens of one window are not independent observations: windows are the clusters that an interval counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kvkeep.core.errors import ConfigError
from kvkeep.evaluation.likelihood import WindowScore
from kvkeep.evaluation.statistics.accuracy import accuracy
from kvkeep.evaluation.statistics.problem_means import ProblemMeans


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Nats per token, or a difference of them.

    Parameters
    ----------
    nats
        Mean over windows of the mean over a window's tokens.
    interval
        95 % interval over windows (Student's t); ``None`` for a single window.
    tokens
        Tokens counted, all windows together.
    """

    nats: float
    interval: tuple[float, float] | None
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Likelihood:
    """What a policy made of a text.

    Parameters
    ----------
    windows
        How many.
    all_tokens, before, after
        Over all predicted tokens; over those predicted before and after the first eviction (``None`` if there
        are none).
    mean_cache, peak_cache
        Entries per KV head and layer that the predicting tokens attended to, mean; and the most stored.
    evictions
        Rounds of eviction a window.
    """

    windows: int
    all_tokens: Estimate
    before: Estimate | None
    after: Estimate | None
    mean_cache: float
    peak_cache: int
    evictions: int

    @property
    def perplexity(self) -> float:
        """``exp`` of the nats per token."""
        return math.exp(self.all_tokens.nats)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**asdict(self), "perplexity": self.perplexity}


def summarise(scores: Sequence[WindowScore], full_at: int | None = None) -> Likelihood:
    """Figures of a run.

    Parameters
    ----------
    scores
        One for each window, all of the same length.
    full_at
        Chunk that parts before from after; default: where the run itself had first evicted. For a baseline
        that never evicts, that of the run it stands beside.
    """
    part = scores[0].full_at if full_at is None else full_at
    weights = np.array(scores[0].tokens, dtype=float)
    return Likelihood(
        windows=len(scores),
        all_tokens=_mean([score.part() for score in scores]),
        before=_mean([score.part(None, part) for score in scores]) if part is not None else None,
        after=_mean([score.part(part, None) for score in scores]) if part is not None else None,
        mean_cache=float(np.mean([np.average(score.entries, weights=weights) for score in scores])),
        peak_cache=max(score.peak for score in scores),
        evictions=max(score.evictions for score in scores),
    )


def difference(
    baseline: Sequence[WindowScore], challenger: Sequence[WindowScore], start: int | None = None
) -> Estimate:
    """Nats per token that the challenger pays more than the baseline, window by window.

    Parameters
    ----------
    start
        Count from this chunk on.

    Raises
    ------
    ConfigError
        If the two did not read the same windows in the same chunks.
    """
    if [(s.name, s.tokens) for s in baseline] != [(s.name, s.tokens) for s in challenger]:
        raise ConfigError("the two runs did not read the same windows in the same chunks: nothing is paired.")
    pairs = [(one.part(start), two.part(start)) for one, two in zip(baseline, challenger, strict=True)]
    return _mean([(two[0] - one[0], one[1]) for one, two in pairs])


def _mean(parts: Sequence[tuple[float, int]]) -> Estimate:
    """Mean over windows of (sum, count)."""
    means = np.array([nats / tokens if tokens else math.nan for nats, tokens in parts])
    interval = None
    if len(means) > 1:
        names = tuple(str(place) for place in range(len(means)))
        ones = np.ones(len(means), dtype=np.int64)
        interval = accuracy(
            ProblemMeans(ids=names, groups=names, means=means, draws=ones, first=means)
        ).interval
    return Estimate(nats=float(means.mean()), interval=interval, tokens=sum(tokens for _, tokens in parts))
