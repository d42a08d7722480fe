"""Naive float64 references: moments of un-rotated queries, and the expected attention they predict."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def rotation(position: int, inv_freq: Sequence[float], scaling: float, dim: int) -> np.ndarray:
    """The rotary embedding of one position as a matrix (half-split pairs)."""
    matrix = np.eye(dim)
    half = len(inv_freq)
    for f, omega in enumerate(inv_freq):
        cos, sin = scaling * math.cos(omega * position), scaling * math.sin(omega * position)
        matrix[f, f], matrix[f, f + half] = cos, -sin
        matrix[f + half, f], matrix[f + half, f + half] = sin, cos
    return matrix


def moments(queries: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Mean and population covariance of un-rotated queries of one head."""
    mean = sum(queries) / len(queries)
    return mean, sum(np.outer(query - mean, query - mean) for query in queries) / len(queries)


def shares(
    keys: Sequence[np.ndarray],
    heads: Sequence[tuple[np.ndarray, np.ndarray]],
    now: int,
    inv_freq: Sequence[float],
    scaling: float,
    horizon: int,
    use_covariance: bool = True,
) -> list[float]:
    """Expected attention of each key of one KV head, mean over its query heads' (mean, covariance)."""
    dim = len(keys[0])
    turn = sum(rotation(now + ahead, inv_freq, scaling, dim) for ahead in range(horizon)) / horizon
    total = np.zeros(len(keys))
    for mean, covariance in heads:
        ahead, spread = turn @ mean, turn @ covariance @ turn.T
        logits = np.array(
            [
                ahead @ key / math.sqrt(dim) + (key @ spread @ key / (2 * dim) if use_covariance else 0.0)
                for key in keys
            ]
        )
        weights = np.exp(logits - logits.max())
        total += weights / weights.sum()
    return list(total / len(heads))
