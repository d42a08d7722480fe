"""StreamingLLM (methods 7.5)."""

from __future__ import annotations

from tests.reference.heads import Head


def kept(head: Head, count: int, sinks: int) -> list[int]:
    """The first ``sinks`` tokens and the newest ``count - sinks`` entries."""
    first = [i for i in range(head.size) if head.positions[i] < sinks]
    rest = [i for i in range(head.size) if i not in first]
    return sorted(first + rest[len(rest) - (count - len(first)) :])
