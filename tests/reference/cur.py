"""CurDKV and VaSE-DKV (methods 2.4, 2.5)."""

from __future__ import annotations

from collections.abc import Sequence

from tests.reference.heads import Head, Vector, dot


def squared_length(vector: Vector, projection: Sequence[Vector] | None) -> float:
    """``||x||^2`` or ``||x G||^2``; the projection is a list of rows."""
    if projection is not None:
        columns = len(projection[0])
        vector = [sum(x * projection[c][r] for c, x in enumerate(vector)) for r in range(columns)]
    return dot(vector, vector)


def shares(sizes: list[float], block: int) -> list[float]:
    """Divide by the sum of the own block."""
    answer = []
    for i, size in enumerate(sizes):
        start = i // block * block
        answer.append(size / sum(sizes[start : start + block]))
    return answer


def score(
    head: Head,
    *,
    recent: int,
    combine: str = "kv_product",
    block: int = 0,
    projection: Sequence[Vector] | None = None,
) -> list[float]:
    """Leverage of everything older than the newest entries; these come last and score 0."""
    older = head.older_than(recent)
    keys = [squared_length(head.keys[i], projection) for i in older]
    values = [squared_length(head.values[i], projection) for i in older]
    if block:
        keys, values = shares(keys, block), shares(values, block)
    joint = []
    for key, value in zip(keys, values, strict=True):
        forms = {"kv_product": key * value, "kv_average": (key + value) / 2, "key": key, "value": value}
        joint.append(forms[combine])
    return [j / sum(joint) for j in joint] + [0.0] * (head.size - len(older))
