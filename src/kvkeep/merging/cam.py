"""Evicted values are spread over the kept entries that follow, by chance: CaM."""

from __future__ import annotations

import torch
from torch import Tensor

from kvkeep.core.decision import KeepDecision
from kvkeep.merging.gone import gone, listed, take, wide

# Upper bound of the elements of one block of who gives to whom.
_BLOCK_ELEMENTS = 1 << 24


def merge_cam(
    values: Tensor,
    attention_sum: Tensor,
    chance: Tensor,
    valid: Tensor,
    decision: KeepDecision,
    *,
    window: int,
) -> Tensor:
    """Values of the kept entries after evicted ones have been merged into those behind them.

    The window of an evicted entry ``i`` is the next ``window`` kept entries in the order of positions (fewer
    at the end). With probability ``min(1, A_i / mean A of the window)``, ``v_i / |window|`` is added to each
    value in it. Keys do not change.

    Parameters
    ----------
    values
        ``[batch, kv_heads, entries, dim]``.
    attention_sum
        float32 ``[batch, kv_heads, entries]``: attention received so far, ``A``.
    chance
        float32, same shape, uniform in (0, 1): an entry merges where this is below its probability.
    valid
        bool, same shape.
    decision
        What stays.
    window
        Kept entries that share an evicted value.

    Returns
    -------
    Tensor
        ``[batch, kv_heads, max_kept, value_dim]`` of the type of ``values``; anything beyond a head's length.

    Source: CaM, in kvpress (methods 7.15).
    """
    leaving, old = gone(decision, valid), take(values, decision.indices)
    if leaving.max_kept == 0 or decision.max_kept == 0:
        return old
    keep = decision.mask(valid.shape[-1])
    first = keep.cumsum(-1).gather(-1, leaving.indices)  # kept entries before: place of the next one
    last = (first + window).minimum(decision.lengths[..., None])
    size = last - first
    received = attention_sum.double().gather(-1, decision.indices).masked_fill(~listed(decision), 0.0)
    before = torch.cat([received.new_zeros(*received.shape[:2], 1), received.cumsum(-1)], dim=-1)
    mean = (before.gather(-1, last) - before.gather(-1, first)) / size.clamp(min=1)
    own = attention_sum.double().gather(-1, leaving.indices)
    # Compared as a product: a window that nobody has looked at yet has a mean of 0.
    merges = (chance.double().gather(-1, leaving.indices) * mean < own) & (size > 0) & listed(leaving)
    place = torch.arange(decision.max_kept, device=values.device)
    batch, heads, kept = received.shape
    block = max(1, _BLOCK_ELEMENTS // (batch * heads * kept))
    added = torch.zeros_like(wide(old))
    for start in range(0, leaving.max_kept, block):
        part = slice(start, start + block)
        gives = (place[:, None] >= first[:, :, None, part]) & (place[:, None] < last[:, :, None, part])
        gives &= merges[:, :, None, part]
        spread = wide(take(values, leaving.indices[..., part])) / size[..., part, None].clamp(min=1)
        added += gives.to(spread.dtype) @ spread
    # What nothing is added to keeps its value to the last bit.
    return torch.where(added != 0, (old + added).to(values.dtype), old)
