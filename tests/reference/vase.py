"""VaSE-AttnV and its variants (methods 2.1 to 2.3), in the order of the official steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tests.reference.heads import Head, keep_top
from tests.reference.window_attention import window_attention


def magnitude(value: Sequence[float], kind: str) -> float:
    """Range, unbiased variance or norm of one value."""
    if kind == "range":
        return max(value) - min(value)
    if kind == "variance":
        mean = math.fsum(value) / len(value)
        return math.fsum((x - mean) ** 2 for x in value) / (len(value) - 1)
    return math.sqrt(math.fsum(x * x for x in value))


def kept(
    head: Head,
    *,
    count: int,
    buffer: int,
    mode: str,
    reserve: int = 0,
    lots: Sequence[float] = (),
    reserve_lots: Sequence[float] = (),
    pool: int = 5,
    temperature: float = 1.0,
) -> list[int]:
    """What one of the official modes keeps.

    ``lots`` are uniform numbers, one per entry. A draw without replacement keeps the largest of
    ``weight / -log(lot)``: the exponential race.
    """
    candidates = head.older_than(buffer)
    wanted = count - buffer
    newest = list(range(head.size - buffer, head.size))
    attention: Callable[[], list[float]] = lambda: window_attention(  # noqa: E731
        head, candidates, pool="avg" if pool > 1 else "none", kernel=pool, temperature=temperature
    )

    def draw(weights: Sequence[float], taken: Sequence[int]) -> list[int]:
        race = [w / -math.log(u) for w, u in zip(weights, lots, strict=True)]
        return keep_top(race, wanted, taken, candidates)

    def largest(kind: str, sinks: bool) -> list[int]:
        sizes = [magnitude(value, kind) for value in head.values]
        for i in range(4 if sinks else 0):
            sizes[i] = math.inf
        return keep_top(sizes, reserve, [], candidates)

    if mode == "attn":
        chosen = keep_top(attention(), wanted, [], candidates)
    elif mode == "attn_sample":
        chosen = draw(attention(), [])
    elif mode == "range_attn":
        chosen = keep_top(attention(), wanted, largest("range", False), candidates)
    elif mode == "range_sample_attn":
        chosen = draw(attention(), largest("range", False))
    elif mode == "range_sink_sample_attn":
        chosen = draw(attention(), largest("range", True))
    elif mode == "var_sink_sample_attn":
        chosen = draw(attention(), largest("variance", True))
    elif mode == "l2_sink_sample_attn":
        chosen = draw(attention(), largest("l2", True))
    elif mode == "attn_random":
        chosen = keep_top(attention(), wanted, keep_top(reserve_lots, reserve, [], candidates), candidates)
    elif mode == "evict_large_range":
        sizes = [-magnitude(value, "range") for value in head.values]
        chosen = keep_top(sizes, wanted, [], candidates)
    elif mode == "evict_random":
        chosen = keep_top(lots, wanted, [], candidates)
    else:
        raise ValueError(mode)
    return sorted(chosen + newest)
