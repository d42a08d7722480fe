"""H2O (methods 7.3)."""

from __future__ import annotations

from tests.reference.heads import Head, keep_top


def kept(head: Head, count: int, recent: int, average: bool = False) -> list[int]:
    """The newest ``recent`` entries and the largest sums among the others."""
    newest = list(range(head.size - recent, head.size))
    sums = head.attention_sum
    if average:
        sums = [s / (head.seq_len - p) for s, p in zip(sums, head.positions, strict=True)]
    return keep_top(sums, count, newest, range(head.size - recent))
