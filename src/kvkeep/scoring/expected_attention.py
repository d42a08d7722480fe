"""Attention that queries like those of the prompt will pay in the near future."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvkeep.core.view import QueryMoments, Rope
from kvkeep.scoring.trigonometric import future_turns, pair_channels, unpair_channels

# Elements of the largest intermediate tensor (a copy of the keys per query head) at a time. On a CPU a few
# megabytes: the allocator hands larger blocks back to the system and fetches their pages anew each time.
_LARGEST_ON_CPU, _LARGEST = 1 << 19, 1 << 25


def mean_rotation(vectors: Tensor, turns: Tensor, rope: Rope) -> Tensor:
    """Multiply the channel pairs of vectors ``[batch, ..., head_dim]`` by ``turns`` ``[batch, pairs]``."""
    turns = turns.view(turns.shape[0], *[1] * (vectors.ndim - 2), -1)
    turned = torch.complex(*pair_channels(vectors, rope.rotary_dim)) * turns
    return unpair_channels(turned.real, turned.imag, rope.rotary_dim)


def expected_attention(
    keys: Tensor,
    among: Tensor,
    seq_lens: Tensor,
    moments: QueryMoments,
    rope: Rope,
    *,
    horizon: int = 512,
    use_covariance: bool = True,
) -> Tensor:
    """Expected share of each entry in the attention of the next ``horizon`` positions.

    If a head's un-rotated queries are normal with mean ``mu`` and covariance ``Sigma``, the expected
    exponential of a logit is ``exp(mu . k / sqrt(d) + k Sigma k / 2d)``, with both moments turned by the
    mean rotation of the positions ahead.

    Parameters
    ----------
    keys
        ``[batch, kv_heads, entries, head_dim]``, rotated.
    among
        bool ``[batch, kv_heads, entries]``: the entries that share the attention; the others score 0.
    seq_lens
        int64 ``[batch]``: the next position.
    moments
        Of the un-rotated queries of this layer.
    horizon
        Positions ahead.
    use_covariance
        Without it only the mean query counts.

    Returns
    -------
    Tensor
        float32 ``[batch, kv_heads, entries]``: mean over the query heads of a group.

    Source: Expected Attention, as in kvpress (methods: query mean and covariance, mean rotation).
    """
    keys = keys.float()
    batch, kv_heads, entries, dim = keys.shape
    ahead = torch.arange(horizon, device=keys.device)
    turns = future_turns(seq_lens, ahead, rope, dim // 2, mean=True)[:, 0].to(torch.complex64)
    mean = mean_rotation(moments.mean, turns, rope).unflatten(1, (kv_heads, -1))
    covariance = None
    if use_covariance:
        # Turning the channels of a symmetric matrix twice, transposed between, is R Sigma R'.
        halfway = mean_rotation(moments.covariance, turns, rope).transpose(-1, -2)
        covariance = mean_rotation(halfway, turns, rope).unflatten(1, (kv_heads, -1))
    largest = _LARGEST_ON_CPU if keys.device.type == "cpu" else _LARGEST
    rows = max(1, largest // (mean.shape[1] * mean.shape[2] * entries * dim))
    shares = []
    for first in range(0, batch, rows):
        part = slice(first, first + rows)
        logits = mean[part] @ keys[part].transpose(-1, -2) / math.sqrt(dim)
        if covariance is not None:
            turned = keys[part, :, None] @ covariance[part]
            logits += torch.linalg.vecdot(turned, keys[part, :, None]) / (2 * dim)
        logits.masked_fill_(~among[part, :, None], float("-inf"))
        shares.append(logits.softmax(-1).mean(2))
    # A head without any such entry has no softmax (NaN).
    return torch.cat(shares).masked_fill(~among, 0.0)
