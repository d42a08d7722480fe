"""Give some slots away before the score is asked: the reserve of VaSE."""

from __future__ import annotations

import torch
from torch import Tensor

from kvkeep.selection.top_k import top_k_mask


def reserve(magnitudes: Tensor, slots: int, *, candidates: Tensor) -> Tensor:
    """Mark the ``slots`` candidates of largest magnitude in every head.

    Parameters
    ----------
    magnitudes
        float32 ``[batch, kv_heads, entries]``.
    slots
        Entries to mark per head; fewer are marked where fewer are candidates.
    candidates
        bool, shape of ``magnitudes``.

    Returns
    -------
    Tensor
        bool, shape of ``magnitudes``.
    """
    if slots <= 0:
        return torch.zeros_like(candidates)
    wanted = candidates.sum(-1).clamp(max=slots)
    return top_k_mask(magnitudes, wanted, slots, candidates)
