"""Every head alike."""

from __future__ import annotations

from torch import Tensor

from kvkeep.allocation.pool import Pool
from kvkeep.allocation.settle import settle


def uniform(pool: Pool) -> Tensor:
    """The equal shares; what a head cannot fill goes to the others alike.

    Returns
    -------
    Tensor
        int64 ``[batch, all heads]``: ``pool.shares`` itself where every head holds as many entries.
    """
    return settle(pool.shares, pool.least, pool.most, pool.total)
