"""The random stream in Python integers, which do not wrap: every product is cut to 64 bits by hand."""

from __future__ import annotations

_BITS = 2**64 - 1


def mix(x: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea & Flood 2014)."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _BITS
    return x ^ (x >> 31)


def absorb(state: int, value: int) -> int:
    """Fold one number into the state."""
    return mix((state * 0x9E3779B97F4A7C15 + value + 0x9E3779B97F4A7C15) & _BITS)


def uniform(
    seed: int, sequence: int, layer: int, eviction: int, purpose: int, head: int, position: int
) -> float:
    """The number of one entry."""
    state = seed & _BITS
    for part in (sequence, layer, eviction, purpose, head, position):
        state = absorb(state, part & _BITS)
    return ((state >> 41) + 0.5) / 2**23
