"""KeyDiff (methods 7.8)."""

from __future__ import annotations

from tests.reference.heads import Head, cosine, length


def score(head: Head) -> list[float]:
    """Minus the cosine with the mean of the unit keys."""
    dim = len(head.keys[0])
    mean = [sum(key[c] / length(key) for key in head.keys) / head.size for c in range(dim)]
    return [-cosine(key, mean) for key in head.keys]
