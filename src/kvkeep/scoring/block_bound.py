"""How well the keys of a block could match a query, from their smallest and largest channels alone."""

from __future__ import annotations

import torch
from torch import Tensor


def block_bound(queries: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Upper bound of the products of a query with the keys of a block.

    ``sum_c max(q_c low_c, q_c high_c)``: no key between the two can give more. Where ``q_c`` is positive the
    larger one counts, else the smaller one, so two matrix products do.

    Parameters
    ----------
    queries
        ``[batch, heads, head_dim]``.
    low, high
        ``[batch, kv_heads, blocks, head_dim]``; blocks without a key may hold anything.

    Returns
    -------
    Tensor
        float32 ``[batch, heads, blocks]``; not divided by sqrt(head_dim), which changes no order.

    Source
    ------
    Quest, arXiv 2406.10774, algorithm 1.
    """
    batch, heads, dim = queries.shape
    grouped = queries.float().view(batch, low.shape[1], heads // low.shape[1], dim)
    bound = torch.einsum("bkgd,bknd->bkgn", grouped.clamp(min=0), high.float())
    bound = bound + torch.einsum("bkgd,bknd->bkgn", grouped.clamp(max=0), low.float())
    return bound.reshape(batch, heads, -1)
