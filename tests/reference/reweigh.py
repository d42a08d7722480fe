"""Changed scores and shared selections in plain loops, from the formulas."""

from __future__ import annotations

import math


def norm_weighted(
    scores: list[float], values: list[list[float]], among: list[bool], *, mass: bool
) -> list[float]:
    """One head: share times ``|v| / mean |v|``, or its logarithm with ``exp(z)`` as the share."""
    norms = [math.sqrt(sum(x * x for x in value)) for value in values]
    inside = [i for i, counts in enumerate(among) if counts]
    mean = sum(norms[i] for i in inside) / len(inside)
    if mass:
        return [score * norm / mean for score, norm in zip(scores, norms, strict=True)]
    z = standardized(scores, among)
    return [each + math.log(norm / mean) for each, norm in zip(z, norms, strict=True)]


def with_recency(
    scores: list[float], ages: list[int], among: list[bool], *, weight: float, half_life: float
) -> list[float]:
    """One head: ``s + weight * deviation * 0.5 ** (age / half_life)``."""
    inside = [score for score, counts in zip(scores, among, strict=True) if counts]
    mean = sum(inside) / len(inside)
    deviation = math.sqrt(sum((score - mean) ** 2 for score in inside) / len(inside))
    return [
        score + weight * deviation * 0.5 ** (age / half_life) for score, age in zip(scores, ages, strict=True)
    ]


def standardized(scores: list[float], among: list[bool]) -> list[float]:
    """One head: mean 0 and deviation 1 over what competes."""
    inside = [score for score, counts in zip(scores, among, strict=True) if counts]
    mean = sum(inside) / len(inside)
    deviation = math.sqrt(sum((score - mean) ** 2 for score in inside) / len(inside))
    return [(score - mean) / deviation for score in scores]


def best(scores: list[float], among: list[bool], kept: list[int], count: int) -> list[int]:
    """What is kept in any case, then the highest of the rest, the oldest first among equals."""
    order = sorted((i for i, counts in enumerate(among) if counts), key=lambda i: (-scores[i], i))
    return sorted([*kept, *order[: count - len(kept)]])
