"""Evicted values join the kept entry whose key is nearest."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvkeep.core.decision import KeepDecision
from kvkeep.merging.gone import gone, listed, take

# Upper bound of the elements of one block of similarities.
_BLOCK_ELEMENTS = 1 << 24


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
    leaving = gone(decision, valid)
    old = values.gather(2, decision.indices[..., None].expand(*decision.indices.shape, values.shape[-1]))
    if leaving.max_kept == 0 or decision.max_kept == 0:
        return old
    home = F.normalize(take(keys, decision.indices), dim=-1)
    own = take(values, decision.indices)
    joined = torch.zeros_like(own)
    weight = own.new_zeros(own.shape[:3])
    stays, goes = listed(decision), listed(leaving)
    batch, heads, kept = stays.shape
    block = max(1, _BLOCK_ELEMENTS // (batch * heads * kept))
    for start in range(0, leaving.max_kept, block):
        part = slice(start, start + block)
        indices = leaving.indices[..., part]
        cosines = F.normalize(take(keys, indices), dim=-1) @ home.transpose(-1, -2)
        target = cosines.masked_fill(~stays[:, :, None], float("-inf")).argmax(-1)
        moved = take(values, indices)
        length = torch.linalg.vector_norm(moved, dim=-1).masked_fill(~goes[..., part], 0.0)
        joined.scatter_add_(2, target[..., None].expand_as(moved), length[..., None] * moved)
        weight.scatter_add_(2, target, length)
    length = torch.linalg.vector_norm(own, dim=-1)
    mixed = (length[..., None] * own + joined) / (length + weight).clamp(min=1e-30)[..., None]
    return torch.where((weight > 0)[..., None], mixed.to(values.dtype), old)
