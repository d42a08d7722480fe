"""Attention that reads chosen blocks only, and the count of what it read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvkeep.core.selector import ReadDecision


@dataclass(frozen=True)
class ReadCount:
    """Entries that one layer read in a step.

    Parameters
    ----------
    distinct
        float64 ``[batch, kv_heads]``: entries of a KV head that any of its query heads read, each once: what
        must be fetched from memory.
    by_query
        float64 ``[batch, kv_heads]``: entries that a query head reads, mean over those of the KV head.
    """

    distinct: Tensor
    by_query: Tensor


def entries_of(decision: ReadDecision, block: int, lens: Tensor) -> tuple[Tensor, Tensor]:
    """Entries of the chosen blocks, and which of them are there.

    Returns
    -------
    tuple
        int64 and bool ``[batch, heads or kv_heads, most * block]``; what is not there points at an entry that
        is.
    """
    chosen = torch.arange(decision.blocks.shape[-1], device=lens.device) < decision.lengths[..., None]
    slots = decision.blocks[..., None] * block + torch.arange(block, device=lens.device)
    there = chosen[..., None] & (slots < lens[:, None, None, None])
    return slots.masked_fill(~there, 0).flatten(2), there.flatten(2)


def attend_to(
    query: Tensor, keys: Tensor, values: Tensor, slots: Tensor, there: Tensor, scaling: float | None
) -> Tensor:
    """Exact attention of one new token per row on some entries of each head.

    Parameters
    ----------
    query
        ``[batch, heads, 1, head_dim]``.
    keys, values
        ``[batch, kv_heads, capacity, dim]``, contiguous.
    slots, there
        From :func:`entries_of`, for query heads or for KV heads.

    Returns
    -------
    Tensor
        ``[batch, 1, heads, value_dim]``.
    """
    batch, heads, _, dim = query.shape
    kv_heads, capacity = keys.shape[1:3]
    readers = slots.shape[1]
    # One table of all entries: each reader gathers rows of its own KV head.
    head = torch.arange(readers, device=slots.device) // (readers // kv_heads)
    first = (torch.arange(batch, device=slots.device)[:, None] * kv_heads + head) * capacity
    flat = (first[..., None] + slots).flatten()

    def gather(table: Tensor) -> Tensor:
        return table.reshape(-1, table.shape[-1]).index_select(0, flat).view(*slots.shape, table.shape[-1])

    # Query heads that read the same entries stand in the place of new tokens.
    output = F.scaled_dot_product_attention(
        query.reshape(batch, readers, heads // readers, dim),
        gather(keys),
        gather(values),
        attn_mask=there[:, :, None],
        scale=scaling,
    )
    return output.reshape(batch, 1, heads, -1)


def count_read(decision: ReadDecision, block: int, lens: Tensor, blocks: int, kv_heads: int) -> ReadCount:
    """Count what a decision reads of ``blocks`` blocks."""
    first = torch.arange(blocks, device=lens.device) * block
    sizes = (lens[:, None] - first).clamp(min=0, max=block).double()
    chosen = torch.arange(decision.blocks.shape[-1], device=lens.device) < decision.lengths[..., None]
    # Places beyond the lengths name arbitrary blocks: added as zeros, they choose none.
    times = torch.zeros(*decision.blocks.shape[:2], blocks, device=lens.device, dtype=torch.int64)
    times.scatter_add_(-1, decision.blocks, chosen.long())
    read = (times > 0).unflatten(1, (kv_heads, -1))
    each = (read * sizes[:, None, None]).sum(-1)
    return ReadCount((read.any(2) * sizes[:, None]).sum(-1), each.mean(2))
