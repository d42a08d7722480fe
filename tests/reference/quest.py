"""Quest (methods 7.17) as plain loops."""

from __future__ import annotations

Vector = list[float]


def bound(query: Vector, page: list[Vector]) -> float:
    """``sum_c max(q_c max_c, q_c min_c)``."""
    return sum(
        max(q * max(key[c] for key in page), q * min(key[c] for key in page)) for c, q in enumerate(query)
    )


def pages(query: Vector, keys: list[Vector], *, page: int, count: int) -> list[int]:
    """Pages that a query head reads: the newest one, and the best others."""
    cut = [keys[start : start + page] for start in range(0, len(keys), page)]
    newest = len(cut) - 1
    others = sorted(range(newest), key=lambda j: (-bound(query, cut[j]), j))
    return sorted([newest, *others[: count - 1]])


def attend(query: Vector, keys: list[Vector], values: list[Vector], read: list[int], page: int) -> Vector:
    """Softmax attention on the entries of some pages; logits over sqrt(d)."""
    import math

    chosen = [i for i in range(len(keys)) if i // page in read]
    logits = [sum(q * k for q, k in zip(query, keys[i], strict=True)) / math.sqrt(len(query)) for i in chosen]
    top = max(logits)
    weights = [math.exp(logit - top) for logit in logits]
    return [
        sum(w * values[i][c] for w, i in zip(weights, chosen, strict=True)) / sum(weights)
        for c in range(len(values[0]))
    ]
