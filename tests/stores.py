"""What the two stores take for the same entries."""

from __future__ import annotations

from collections.abc import Sequence

PAGE = 5  # entries per page in tests that run on either store


def kv_bytes(store: str, entries: Sequence[int], per_entry: int) -> int:
    """Bytes of keys and values when heads hold at most so many entries, one number a head.

    The dense store gives every head as many slots as the longest needs; the paged one gives each head
    whole pages, and has one empty page.
    """
    if store == "dense":
        return len(entries) * max(entries) * per_entry
    return (sum(-(-count // PAGE) for count in entries) + 1) * PAGE * per_entry
