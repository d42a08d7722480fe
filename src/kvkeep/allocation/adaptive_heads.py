"""The heads of one layer share its budget by what they score (Ada-KV)."""

from __future__ import annotations

from torch import Tensor

from kvkeep.allocation.best import count_best
from kvkeep.allocation.pool import Pool
from kvkeep.allocation.settle import settle
from kvkeep.allocation.whole_model import whole_model


def safeguarded(pool: Pool, *, safe: float = 0.2) -> Tensor:
    """Every head keeps its own best, a share ``safe`` of the budget; the rest goes to the best of the layer.

    Source
    ------
    Ada-KV as kvpress has it (``alpha_safeguard``), for the heads of one layer.

    Returns
    -------
    Tensor
        int64 ``[batch, heads]``.
    """
    return whole_model(pool, floor=(pool.shares.double() * safe).long())


def mixed_with_equal(pool: Pool, *, floor: float = 0.5) -> Tensor:
    """Mix two shares of the free slots: what a head wins in the ranking of the layer, and the equal one.

    Parameters
    ----------
    pool
        The heads of one layer.
    floor
        Weight of the equal share: 1 is uniform, 0 the plain ranking (README of the code: 0.5, paper: 0.2).

    Source
    ------
    Ada-KV, arXiv 2407.11550, official code FFY0/AdaKV: ``count (1 - floor) + floor * base``.
    """
    won = count_best(pool.scores, pool.positions, pool.total - pool.least.sum(-1))
    equal = (pool.shares - pool.least).double()
    return settle(pool.least + won.double() * (1 - floor) + equal * floor, pool.least, pool.most, pool.total)
