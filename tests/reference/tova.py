"""TOVA (methods 7.4)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tests.reference.heads import Head, dot, softmax


def score(layer: Sequence[Head]) -> list[float]:
    """Attention of the last query to all entries, averaged over every query head of the layer."""
    total, votes = [0.0] * layer[0].size, 0
    for head in layer:
        for query_head in head.queries:
            query = query_head[-1]
            shares = softmax([dot(query, key) / math.sqrt(len(key)) for key in head.keys])
            total = [t + s for t, s in zip(total, shares, strict=True)]
            votes += 1
    return [t / votes for t in total]
