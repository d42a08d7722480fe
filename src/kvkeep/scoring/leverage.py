"""Leverage of keys and values: how much of a matrix one row carries (CurDKV, VaSE-DKV)."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kvkeep.core.random import RandomStream
from kvkeep.scoring.lengths import lengths

Leverage = Literal["kv_product", "kv_average", "key", "value"]
LEVERAGES: tuple[str, ...] = ("kv_product", "kv_average", "key", "value")


def gaussian_projection(random: RandomStream, dim: int, rank: int) -> Tensor:
    """Draw ``G ~ N(0, 1) / sqrt(rank)`` of shape ``[batch, dim, rank]``, one for each sequence.

    Keys and values share it, and so do all heads; ``||x G||^2`` is then an unbiased estimate of
    ``||x||^2`` with relative standard deviation ``sqrt(2 / rank)``.
    """
    return random.normal((dim, rank)) / math.sqrt(rank)


def squared_norms(vectors: Tensor, projection: Tensor | None = None) -> Tensor:
    """Squared length of each vector, exactly or after a random projection.

    Parameters
    ----------
    vectors
        ``[batch, kv_heads, entries, dim]``.
    projection
        float32 ``[batch, dim, rank]`` shared by all heads of a sequence, or ``None`` for the exact length;
        rows beyond the vectors' own dim are not used.

    Returns
    -------
    Tensor
        float32 ``[batch, kv_heads, entries]``.
    """
    if projection is not None:
        # float32: a long key in float16 would overflow on the way.
        vectors = torch.matmul(vectors.float(), projection[:, None, : vectors.shape[-1]])
    return lengths(vectors).square()


def leverage(
    key_norms: Tensor,
    value_norms: Tensor,
    among: Tensor,
    *,
    combine: Leverage = "kv_product",
    block: int = 0,
) -> Tensor:
    """Combine squared norms of keys and values into scores that sum to one per head.

    Parameters
    ----------
    key_norms, value_norms
        float32 ``[batch, kv_heads, entries]``.
    among
        bool, same shape: the entries that share the sum; the others score 0.
    combine
        Product, average, or one side alone.
    block
        Divide either side by its sum over disjoint blocks of so many entries first, so that every
        stretch of text gets an equal share (local approximation of CurDKV); 0 is off.
    """
    key_norms = key_norms.masked_fill(~among, 0.0)
    value_norms = value_norms.masked_fill(~among, 0.0)
    if block:
        key_norms, value_norms = _share(key_norms, block), _share(value_norms, block)
    if combine == "kv_product":
        joint = key_norms * value_norms
    elif combine == "kv_average":
        joint = (key_norms + value_norms) / 2
    else:
        joint = key_norms if combine == "key" else value_norms
    return joint / joint.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)


def _share(norms: Tensor, block: int) -> Tensor:
    entries = norms.shape[-1]
    blocks = F.pad(norms, (0, -entries % block)).unflatten(-1, (-1, block))
    shares = blocks / blocks.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    return shares.flatten(-2)[..., :entries]
