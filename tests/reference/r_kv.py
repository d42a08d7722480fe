"""R-KV, the original (methods 7.1) and the VaSE study's (2.6)."""

from __future__ import annotations

from collections.abc import Sequence

from tests.reference.heads import Head, cosine, softmax
from tests.reference.window_attention import window_attention


def similarity(head: Head, among: Sequence[int]) -> list[list[float]]:
    """Cosines of all pairs, diagonal zero."""
    return [[0.0 if i == j else cosine(head.keys[i], head.keys[j]) for j in among] for i in among]


def redundancy(matrix: list[list[float]], threshold: float | None) -> list[float]:
    """Softmax of the column means, after each row has let its newest duplicate off."""
    size = len(matrix)
    matrix = [list(row) for row in matrix]
    if threshold is not None:
        for row in matrix:
            newest = 0
            for j in range(size):
                if row[j] > threshold:
                    newest = j
            row[newest] = 0.0
    return softmax([sum(matrix[i][j] for i in range(size)) / size for j in range(size)])


def score(head: Head, *, variant: str, window: int, lam: float, threshold: float = 0.5) -> list[float]:
    """``lam * attention - (1 - lam) * redundancy``."""
    older = head.older_than(window)
    if variant == "original":
        attention = window_attention(head, older, group_reduce="logit_max", pool="max", kernel=7)
        everyone = list(range(head.size))
        repeats = redundancy(similarity(head, everyone), threshold)
    else:
        attention = window_attention(head, older, pool="avg", kernel=5)
        repeats = redundancy(similarity(head, older), None) + [0.0] * window
    return [lam * a - (1 - lam) * r for a, r in zip(attention, repeats, strict=True)]
