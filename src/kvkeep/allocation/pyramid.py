"""More for the first layers, less for the last (PyramidKV)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvkeep.allocation.pool import Pool
from kvkeep.allocation.settle import settle


def pyramid(pool: Pool, *, beta: float = 20.0) -> Tensor:
    """Counts that fall in a straight line from the first layer to the last; heads of a layer are alike.

    With ``b`` the share that is free beside the protected entries, the last layer gets ``b / beta`` and the
    first ``2 b - b / beta``. Where the first layer holds less than that, it keeps everything and the line
    becomes flatter. Where even ``b`` is more than there is, every layer gets its share.

    Parameters
    ----------
    pool
        All layers of the model, in order.
    beta
        How much less than the mean the last layer gets, above 1.

    Returns
    -------
    Tensor
        int64 ``[batch, all heads]``.

    Source
    ------
    PyramidKV, its official code (window on top of the line), where ``capacity - window`` is our free share.
    """
    layers = len(pool.heads)
    protected, held = pool.least.amax(-1).double(), pool.most.amax(-1).double()
    share = pool.shares[:, 0]
    free = share - protected
    last = free / beta
    first = 2 * free - last
    full = first >= held - protected
    first = torch.where(full, held - protected, first)
    last = torch.where(full, 2 * free - first, last)
    step = (first - last) / max(layers - 1, 1)
    line = protected[:, None] + first[:, None] - torch.arange(layers, device=share.device) * step[:, None]
    slopes = (first >= last) & (last >= 0) if layers > 1 else torch.zeros_like(full)
    ideal = torch.where(slopes[:, None], line, share[:, None].double())
    # Rounded per layer first, so that the heads of a layer stay alike.
    bound = torch.full_like(ideal, 2 * int(share.max()), dtype=torch.int64)
    per_layer = settle(ideal, torch.zeros_like(bound), bound, share * layers)
    repeats = torch.tensor(pool.heads, device=share.device)
    return settle(per_layer.repeat_interleave(repeats, dim=1), pool.least, pool.most, pool.total)
