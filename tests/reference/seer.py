"""SeerAttention-R (methods 7.16) as plain loops."""

from __future__ import annotations

import math

Vector = list[float]


def turn(vector: Vector, position: int, angles: Vector) -> Vector:
    """Rotary embedding, half-split; ``angles`` per position and pair."""
    half, out = len(angles), list(vector)
    for f, angle in enumerate(angles):
        c, s = math.cos(position * angle), math.sin(position * angle)
        out[f] = vector[f] * c - vector[f + half] * s
        out[f + half] = vector[f + half] * c + vector[f] * s
    return out


def project(vector: Vector, weight: list[Vector], norm: Vector | None) -> Vector:
    """``vector @ weight``, then RMSNorm."""
    out = [sum(x * row[w] for x, row in zip(vector, weight, strict=True)) for w in range(len(weight[0]))]
    if norm is None:
        return out
    size = math.sqrt(sum(x * x for x in out) / len(out) + 1e-6)
    return [x / size * n for x, n in zip(out, norm, strict=True)]


def pooled(keys: list[Vector]) -> Vector:
    """Largest, smallest and mean key of a block, side by side."""
    channels = list(zip(*keys, strict=True))
    return [*map(max, channels), *map(min, channels), *(sum(c) / len(c) for c in channels)]


def logit(
    queries: list[Vector],
    position: int,
    keys: list[Vector],
    first: int,
    query_weight: list[Vector],
    key_weight: list[Vector],
    norms: tuple[Vector, Vector] | None,
    angles: Vector,
) -> float:
    """What a gate says of one block; queries of a group and keys of the block are not rotated."""
    query_norm, key_norm = norms or (None, None)
    one = turn(project([x for query in queries for x in query], query_weight, query_norm), position, angles)
    other = turn(project(pooled(keys), key_weight, key_norm), first, angles)
    return sum(a * b for a, b in zip(one, other, strict=True)) / math.sqrt(len(one))


def target(group: list[Vector], block: int) -> Vector:
    """Share of each block: attention pooled by max over the block and the group, over its sum."""
    count = -(-len(group[0]) // block)
    best = [max(max(row[j * block : (j + 1) * block]) for row in group) for j in range(count)]
    return [share / (sum(best) + 1e-9) for share in best]
