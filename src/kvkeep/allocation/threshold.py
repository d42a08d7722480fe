"""Every entry that scores well enough stays, however many they are, or as long as the share lasts."""

from __future__ import annotations

import torch
from torch import Tensor

from kvkeep.allocation.pool import Pool


def above_threshold(pool: Pool, *, threshold: float) -> Tensor:
    """Protected entries and those that score at least ``threshold``: no promise about the total.

    Returns
    -------
    Tensor
        int64 ``[batch, all heads]``.

    Source
    ------
    DBTrimKV's ``threshold``, arXiv 2605.09649, official code; KVzap (kvpress) drops by one, too.
    """
    counts = [(score >= threshold).sum(-1) for score in pool.scores]
    return pool.least + torch.cat(counts, dim=1)


def above_threshold_within_share(pool: Pool, *, threshold: float) -> Tensor:
    """The same, but no head keeps more than its share; protected entries stay in any case.

    Returns
    -------
    Tensor
        int64 ``[batch, all heads]``: what a head does not need goes to no other head.
    """
    most = torch.maximum(pool.shares, pool.least)
    return torch.minimum(above_threshold(pool, threshold=threshold), most)
