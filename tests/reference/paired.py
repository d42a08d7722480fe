"""Paired comparison the slow way: one resample at a time, from the definition."""

from __future__ import annotations

import itertools

import numpy as np


def bootstrap(
    sums: np.ndarray, sizes: np.ndarray, resamples: int, rng: np.random.Generator
) -> tuple[np.ndarray, float]:
    """Resampled means and the two-sided p."""
    count, means = len(sums), []
    for _ in range(resamples):
        chosen = [int(rng.integers(count)) for _ in range(count)]
        means.append(sum(sums[c] for c in chosen) / sum(sizes[c] for c in chosen))
    below = sum(mean < 1e-12 for mean in means)
    above = sum(mean > -1e-12 for mean in means)
    return np.array(means), min(1.0, 2 * (min(below, above) + 1) / (resamples + 1))


def sign_flip(sums: np.ndarray) -> float:
    """Exact p: all signs."""
    signs = list(itertools.product((-1, 1), repeat=len(sums)))
    observed = abs(sums.sum()) - 1e-12
    return sum(abs(float(np.dot(sign, sums))) >= observed for sign in signs) / len(signs)
