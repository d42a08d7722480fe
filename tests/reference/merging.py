"""Merging of evicted values in plain loops, from the formulas; one head at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence

Vectors = Sequence[Sequence[float]]


def length(vector: Sequence[float]) -> float:
    """Euclidean."""
    return math.sqrt(sum(x * x for x in vector))


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """0 where a vector has no direction."""
    scale = length(one) * length(other)
    return sum(x * y for x, y in zip(one, other, strict=True)) / scale if scale else 0.0


def nearest(keys: Vectors, values: Vectors, kept: list[int]) -> list[list[float]]:
    """Values of the kept entries; every other entry joins the kept one of highest key cosine."""
    guests: dict[int, list[int]] = {i: [] for i in kept}
    for i in range(len(keys)):
        if i not in guests:
            best = max(kept, key=lambda j: (cosine(keys[i], keys[j]), -j))
            guests[best].append(i)
    answer = []
    for home in kept:
        party = [home, *guests[home]]
        total = sum(length(values[i]) for i in party)
        if len(party) == 1 or total == 0:
            answer.append(list(values[home]))
            continue
        mean = [
            sum(length(values[i]) * values[i][c] for i in party) / total for c in range(len(values[home]))
        ]
        answer.append(mean)
    return answer


def cam(
    values: Vectors, attention: Sequence[float], chance: Sequence[float], kept: list[int], window: int
) -> list[list[float]]:
    """Values of the kept entries; every other entry may give its value to the next kept ones."""
    answer = {i: list(values[i]) for i in kept}
    for i in range(len(values)):
        behind = [j for j in kept if j > i][:window]
        if i in answer or not behind:
            continue
        mean = sum(attention[j] for j in behind) / len(behind)
        probability = min(1.0, attention[i] / mean) if mean else float(attention[i] > 0)
        if chance[i] < probability:
            for j in behind:
                answer[j] = [a + b / len(behind) for a, b in zip(answer[j], values[i], strict=True)]
    return [answer[i] for i in kept]
