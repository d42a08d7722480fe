"""The entries that an eviction takes, side by side."""

from __future__ import annotations

import torch
from torch import Tensor

from kvkeep.core.decision import KeepCounts, KeepDecision


def gone(decision: KeepDecision, valid: Tensor) -> KeepDecision:
    """Indices and numbers of the entries that go, as a decision would list them (reads the device once).

    Parameters
    ----------
    decision
        What stays.
    valid
        bool ``[batch, kv_heads, entries]``: slots that hold an entry.
    """
    evicted = valid & ~decision.mask(valid.shape[-1])
    lengths = evicted.sum(-1)
    return KeepDecision.from_mask(evicted, KeepCounts(lengths, int(lengths.max())))


def listed(decision: KeepDecision) -> Tensor:
    """bool ``[batch, kv_heads, max_kept]``: where :attr:`KeepDecision.indices` mean something."""
    return torch.arange(decision.max_kept, device=decision.indices.device) < decision.lengths[..., None]


def take(tensor: Tensor, indices: Tensor) -> Tensor:
    """Entries ``[batch, kv_heads, n, dim]`` of ``[batch, kv_heads, entries, dim]``, whole vectors at once."""
    batch, heads, entries, dim = tensor.shape
    first = torch.arange(batch * heads, device=tensor.device).view(batch, heads, 1) * entries
    flat = tensor.reshape(-1, dim).index_select(0, (first + indices).reshape(-1))
    return flat.view(batch, heads, -1, dim)


def wide(tensor: Tensor) -> Tensor:
    """The same numbers in float32 at least."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
