"""Naive float64 references of the greedy, set-conditioned choice: a plain loop, and a lazy heap."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    """Cosine of two vectors; 0 if one of them is zero."""
    norms = math.sqrt(sum(x * x for x in a)) * math.sqrt(sum(x * x for x in b))
    return sum(x * y for x, y in zip(a, b, strict=True)) / norms if norms else 0.0


def greedy(
    scores: Sequence[float],
    vectors: Sequence[Sequence[float]],
    count: int,
    weight: float,
    *,
    candidates: Sequence[int] | None = None,
    start: Sequence[int] = (),
    similarity: str = "max",
    clamp: bool = True,
) -> list[int]:
    """Picks in order. ``start`` is in the set from the beginning but is not returned."""
    pool = list(range(len(scores)) if candidates is None else candidates)
    members, picks = list(start), []
    for _ in range(count):
        best, highest = -1, -math.inf
        for i in pool:
            likes = [cosine(vectors[i], vectors[j]) for j in members]
            likes = [max(0.0, like) for like in likes] if clamp else likes
            penalty = 0.0
            if likes:
                penalty = max(likes) if similarity == "max" else sum(likes)
                penalty /= len(likes) if similarity == "mean" else 1
            if scores[i] - weight * penalty > highest:
                best, highest = i, scores[i] - weight * penalty
        picks.append(best)
        members.append(best)
        pool.remove(best)
    return picks


def lazy_greedy(
    scores: Sequence[float], vectors: Sequence[Sequence[float]], count: int, weight: float
) -> list[int]:
    """The same picks for the clamped maximum, by a heap of bounds that can only fall."""
    heap = [(-score, i, 0) for i, score in enumerate(scores)]
    heapq.heapify(heap)
    likeness, seen, picks = [0.0] * len(scores), [0] * len(scores), []
    while len(picks) < count:
        _, i, fresh_at = heapq.heappop(heap)
        if fresh_at == len(picks):
            picks.append(i)
            continue
        for j in picks[seen[i] :]:
            likeness[i] = max(likeness[i], cosine(vectors[i], vectors[j]))
        seen[i] = len(picks)
        heapq.heappush(heap, (-(scores[i] - weight * likeness[i]), i, len(picks)))
    return picks
