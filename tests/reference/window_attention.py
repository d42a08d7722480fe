"""Attention of a window of queries, one number at a time (methods 0.3)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tests.reference.heads import Head, dot, softmax


def window_attention(
    head: Head,
    among: Sequence[int],
    *,
    group_reduce: str = "prob_mean",
    pool: str = "none",
    kernel: int = 5,
    temperature: float = 1.0,
) -> list[float]:
    """Mean attention over the queries that exist; 0 outside ``among``, which is one run of entries."""
    dim = len(head.keys[0])
    asked = [w for w, time in enumerate(head.query_positions) if time >= 0]
    logits = [
        [[dot(q[w], head.keys[i]) / (math.sqrt(dim) * temperature) for i in among] for w in asked]
        for q in head.queries
    ]
    if group_reduce == "logit_max":
        logits = [[[max(column) for column in zip(*rows, strict=True)] for rows in zip(*logits, strict=True)]]
    elif group_reduce == "logit_mean":
        logits = [
            [
                [math.fsum(column) / len(column) for column in zip(*rows, strict=True)]
                for rows in zip(*logits, strict=True)
            ]
        ]
    total = [0.0] * len(among)
    for rows in logits:
        for row in rows:
            for i, share in enumerate(softmax(row)):
                total[i] += share / (len(logits) * len(asked))
    answer = [0.0] * head.size
    for i, score in zip(among, pooled(total, pool, kernel), strict=True):
        answer[i] = score
    return answer


def pooled(scores: Sequence[float], kind: str, kernel: int) -> list[float]:
    """Stride 1; the average counts the zeros beyond the ends, the maximum ignores them."""
    if kind == "none":
        return list(scores)
    half, answer = kernel // 2, []
    for i in range(len(scores)):
        inside = scores[max(0, i - half) : i + half + 1]
        answer.append(math.fsum(inside) / kernel if kind == "avg" else max(inside))
    return answer
