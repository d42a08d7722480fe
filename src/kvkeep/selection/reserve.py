"""Give some slots away before the score is asked: the reserve of VaSE."""

from __future__ import annotations

import torch
from torch import Tensor

from kvkeep.core.decision import KeepCounts
from kvkeep.selection.top_k import top_k_mask


def reserve(magnitudes: Tensor, slots: int | Tensor, *, candidates: Tensor) -> Tensor:
    """Mark the ``slots`` candidates of largest magnitude in every head.

    Parameters
    ----------
    magnitudes
        float32 ``[batch, kv_heads, entries]``.
    slots
        Entries to mark per head, a number or int64 ``[batch, kv_heads]``; fewer are marked where fewer are
        candidates.
    candidates
        bool, shape of ``magnitudes``.

    Returns
    -------
    Tensor
        bool, shape of ``magnitudes``.
    """
    largest = int(slots.max()) if isinstance(slots, Tensor) else slots
    if largest <= 0:
        return torch.zeros_like(candidates)
    wanted = candidates.sum(-1).clamp(max=slots)
    return top_k_mask(magnitudes, wanted, largest, candidates)


def reserve_of_share(slots: int, counts: KeepCounts, share: Tensor, protected: Tensor) -> Tensor:
    """The reserve of heads that keep more or less than the equal share, in proportion to their free slots.

    A head whose free slots are half of what the equal share would leave reserves half as many, so reserve and
    rest keep their ratio in every head, and both fit.

    Parameters
    ----------
    slots
        The reserve at the equal share.
    counts
        Entries per head, protected ones included.
    share
        int64 ``[batch]``: the equal share of each row.
    protected
        bool ``[batch, kv_heads, entries]``.

    Returns
    -------
    Tensor
        int64 ``[batch, kv_heads]``: ``slots`` where a head has the equal share.
    """
    kept = protected.sum(-1)
    free = (counts.per_head - kept).clamp(min=0)
    usual = (share[:, None] - kept).clamp(min=1)
    return torch.minimum(slots * free // usual, free)
