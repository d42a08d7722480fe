"""Bootstrap over clusters and the sign-flip test, for one study or for many at once.

Arrays are ``[..., clusters]``: leading axes are separate studies on the same clusters, which share
the random resamples.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvkeep.core.errors import ConfigError
from kvkeep.evaluation.extras import need

# Sums of thirds are not exact: what differs from zero by less than this is zero.
_ZERO = 1e-12
_BATCH_CELLS = 1_000_000


def bootstrap_means(
    sums: np.ndarray, sizes: np.ndarray, *, resamples: int, rng: np.random.Generator
) -> np.ndarray:
    """Means of resampled studies, ``[..., resamples]``.

    Parameters
    ----------
    sums, sizes
        Sum of the differences in each cluster, ``[..., clusters]``, and problems in it, ``[clusters]``.
        Whole clusters are drawn with replacement, with all problems, draws and both arms.
    resamples
        Number of resampled studies.

    Raises
    ------
    ConfigError
        If there are fewer than two clusters.
    """
    _check(sums, resamples)
    stats = need("scipy.stats", extra="eval", purpose="the bootstrap")
    settings: dict[str, Any] = {
        "n_resamples": resamples,
        "batch": max(1, _BATCH_CELLS // sums.size),
        "method": "percentile",
        "vectorized": True,
        "axis": -1,
        "rng": rng,
    }
    if (sizes == 1).all():
        return stats.bootstrap((sums,), np.mean, **settings).bootstrap_distribution
    weights = np.broadcast_to(sizes, sums.shape)
    return stats.bootstrap((sums, weights), _ratio, paired=True, **settings).bootstrap_distribution


def _ratio(sums: np.ndarray, sizes: np.ndarray, axis: int = -1) -> np.ndarray:
    return sums.sum(axis=axis) / sizes.sum(axis=axis)


def bootstrap_p(distribution: np.ndarray) -> np.ndarray:
    """Two-sided p of "no difference" from resampled differences ``[..., resamples]``.

    Twice the smaller share of resamples on either side of zero (zeros count on both), with one
    imaginary resample at zero so that p is never 0: the smallest value is ``2 / (resamples + 1)``.
    """
    count = distribution.shape[-1] + 1
    below = ((distribution <= _ZERO).sum(axis=-1) + 1) / count
    above = ((distribution >= -_ZERO).sum(axis=-1) + 1) / count
    return np.minimum(1.0, 2 * np.minimum(below, above))


def sign_flip_p(sums: np.ndarray, *, resamples: int, rng: np.random.Generator) -> np.ndarray:
    """Two-sided p of "the arms are exchangeable": how often random signs give a sum as large.

    Valid for any number of clusters; exact, by going through all signs, if there are no more than
    ``resamples`` ways to set them. With one draw per problem it is McNemar's exact test.

    Parameters
    ----------
    sums
        Sum of the differences in each cluster, ``[..., clusters]``.
    """
    _check(sums, resamples)
    stats = need("scipy.stats", extra="eval", purpose="the sign-flip test")
    result = stats.permutation_test(
        (sums,),
        np.sum,
        permutation_type="samples",
        n_resamples=resamples,
        batch=max(1, _BATCH_CELLS // sums.size),
        vectorized=True,
        axis=-1,
        rng=rng,
    )
    # No difference at all is as far from a finding as can be, whatever rounding says.
    return np.where(np.abs(sums.sum(axis=-1)) <= _ZERO * sums.shape[-1], 1.0, result.pvalue)


def _check(sums: np.ndarray, resamples: int) -> None:
    if sums.shape[-1] < 2:
        raise ConfigError(f"{sums.shape[-1]} problems (or clusters) cannot be resampled: give at least two.")
    if resamples < 100:
        raise ConfigError(f"{resamples} resamples are too few for an interval: 10000 is usual.")
