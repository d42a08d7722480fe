"""Evicted values join the kept entry whose key is nearest."""

from __future__ import annotations

import torch
from torch import Tensor

from kvkeep.core.decision import KeepDecision
from kvkeep.merging.gone import gone, listed, take, wide

# Upper bound of the elements of one block of similarities.
_BLOCK_ELEMENTS = 1 << 24
# Length below which a vector has no direction.
_SHORTEST = 1e-30


def merge_nearest(keys: Tensor, values: Tensor, valid: Tensor, decision: KeepDecision) -> Tensor:
    """Values of the kept entries after each evicted one has joined the kept one of highest key cosine.

    A kept value becomes the mean of itself and of what joins it, each weighing its own length:
    ``(|v| v + sum |u| u) / (|v| + sum |u|)``. Equal cosines go to the oldest entry. An entry that nothing
    joins keeps its value to the last bit. Keys do not change.

    Parameters
    ----------
    keys, values
        ``[batch, kv_heads, entries, dim]``.
    valid
        bool ``[batch, kv_heads, entries]``.
    decision
        What stays.

    Returns
    -------
    Tensor
        ``[batch, kv_heads, max_kept, value_dim]`` of the type of ``values``; anything beyond a head's length.

    Source: kvpress, merging press (methods 7.15, variant).
    """
    leaving, old = gone(decision, valid), take(values, decision.indices)
    if leaving.max_kept == 0 or decision.max_kept == 0:
        return old
    home = wide(take(keys, decision.indices))
    # The length of the evicted key scales all of its cosines alike: it is not asked for.
    scale = torch.linalg.vector_norm(home, dim=-1).clamp(min=_SHORTEST)[:, :, None]
    absent = ~listed(decision)[:, :, None]
    batch, heads, kept, dim = old.shape
    block = max(1, _BLOCK_ELEMENTS // (batch * heads * kept))
    parts = []
    for start in range(0, leaving.max_kept, block):
        away = wide(take(keys, leaving.indices[..., start : start + block]))
        cosines = (away @ home.transpose(-1, -2)).div_(scale)
        parts.append(cosines.masked_fill_(absent, float("-inf")).argmax(-1))
    target = torch.cat(parts, dim=-1)
    guests = wide(take(values, leaving.indices))
    length = torch.linalg.vector_norm(guests, dim=-1).masked_fill(~listed(leaving), 0.0)
    weight = length.new_zeros(batch, heads, kept).scatter_add_(2, target, length)
    place = target[..., None].expand(-1, -1, -1, dim)
    joined = guests.new_zeros(old.shape).scatter_add_(2, place, length[..., None] * guests)
    # From here on only where somebody has joined; hosts of several guests are written several times, alike.
    host, weight = wide(take(old, target)), weight.gather(2, target)[..., None]
    own = torch.linalg.vector_norm(host, dim=-1, keepdim=True)
    mixed = (own * host + take(joined, target)) / (own + weight).clamp(min=_SHORTEST)
    mixed = torch.where(weight > 0, mixed, host)
    return old.scatter(2, place, mixed.to(old.dtype))
