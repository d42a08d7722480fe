"""Key norm (methods 7.8)."""

from __future__ import annotations

from tests.reference.heads import Head, length


def score(head: Head) -> list[float]:
    """Minus the length of the key."""
    return [-length(key) for key in head.keys]
