"""What block gates learn: attention pooled over blocks; and how far they are from it."""

from __future__ import annotations

import torch
from torch import Tensor


def block_target(attention: Tensor, block: int, kv_heads: int) -> Tensor:
    """The share that each block should get from the gate of a query.

    Attention is max-pooled over the entries of a block, then over the query heads of a KV head, and divided
    by its sum over blocks.

    Parameters
    ----------
    attention
        ``[batch, heads, queries, entries]``: probabilities; zero at entries newer than the query.
    block
        Entries of a block; the last one may be shorter.

    Returns
    -------
    Tensor
        float32 ``[batch, kv_heads, queries, blocks]``.

    Source
    ------
    SeerAttention-R, arXiv 2506.08889, and its official code (1e-9 in the divisor).
    """
    pooled = pooled_attention(attention, block, kv_heads)
    return pooled / (pooled.sum(-1, keepdim=True) + 1e-9)


def pooled_attention(attention: Tensor, block: int, kv_heads: int) -> Tensor:
    """Largest probability in each block over the group, ``[batch, kv_heads, queries, blocks]``."""
    return _in_blocks(attention, block).amax(-1).unflatten(1, (kv_heads, -1)).amax(2)


def block_mass(attention: Tensor, block: int, kv_heads: int) -> Tensor:
    """Attention on each block, mean over the group, ``[batch, kv_heads, queries, blocks]``."""
    return _in_blocks(attention, block).sum(-1).unflatten(1, (kv_heads, -1)).mean(2)


def _in_blocks(attention: Tensor, block: int) -> Tensor:
    missing = -attention.shape[-1] % block
    return torch.nn.functional.pad(attention.float(), (0, missing)).unflatten(-1, (-1, block))


def divergence(target: Tensor, logits: Tensor, begun: Tensor, counted: Tensor) -> Tensor:
    """KL of the target to the softmax of the gate, mean over all elements that count.

    Parameters
    ----------
    target, logits
        ``[batch, kv_heads, queries, blocks]``.
    begun
        bool ``[queries, blocks]``: blocks that hold an entry no newer than the query.
    counted
        bool ``[batch, queries]``: queries that count.

    Returns
    -------
    Tensor
        A scalar. As in the published code the mean runs over queries *and* blocks, so that longer rows weigh
        less.
    """
    said = logits.float().masked_fill(~begun, -torch.inf).log_softmax(-1).masked_fill(~begun, 0.0)
    each = torch.special.xlogy(target, target) - target * said
    weights = counted[:, None, :, None]
    count = counted.sum().clamp(min=1) * target.shape[1] * target.shape[-1]
    return (each * weights).sum() / count


def covered(mass: Tensor, logits: Tensor, own: Tensor, begun: Tensor, blocks: int) -> Tensor:
    """Share of a query's attention in the blocks that a gate would read.

    Parameters
    ----------
    mass, logits
        ``[batch, kv_heads, queries, blocks]``: attention on each block, and what ranks them.
    own
        int64 ``[queries]``: the block of the query itself; it and the first one are always read.
    begun
        bool ``[queries, blocks]``.
    blocks
        Blocks that are read.

    Returns
    -------
    Tensor
        ``[batch, kv_heads, queries]``.
    """
    rank = logits.float().masked_fill(~begun, -torch.inf)
    places = torch.arange(mass.shape[-1], device=mass.device)
    always = (places == own[:, None]) | (places == 0)
    best = rank.masked_fill(always, torch.inf).topk(min(blocks, mass.shape[-1]), dim=-1).indices
    return mass.gather(-1, best).sum(-1)
