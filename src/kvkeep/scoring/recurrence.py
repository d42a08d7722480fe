"""When entries are attended to again: the last time, and the longest pause before one."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvkeep.scoring.window_attention import hide


def active(
    queries: Tensor,
    query_positions: Tensor,
    keys: Tensor,
    positions: Tensor,
    valid: Tensor,
    threshold: float,
) -> Tensor:
    """Which entries each query attends to with more than a threshold.

    Parameters
    ----------
    queries, query_positions
        ``[batch, heads, count, head_dim]`` rotated and int64 ``[batch, count]``; queries at -1 attend to
        nothing.
    keys, positions, valid
        ``[batch, kv_heads, entries, head_dim]`` and ``[batch, kv_heads, entries]``.

    Returns
    -------
    Tensor
        bool ``[batch, kv_heads, count, entries]``: for any query head of the KV head.
    """
    batch, heads, count, dim = queries.shape
    group = heads // keys.shape[1]
    grouped = queries.float().reshape(batch, keys.shape[1], group * count, dim)
    logits = torch.matmul(grouped / math.sqrt(dim), keys.float().transpose(-1, -2))
    hide(logits.unflatten(2, (group, count)), query_positions, positions, valid, True)
    most = logits.softmax(-1).unflatten(2, (group, count)).amax(2)
    counted = (query_positions >= 0)[:, None, :, None] & valid[:, :, None]
    return (most > threshold) & counted


def recurrence(attended: Tensor, times: Tensor, last: Tensor, pause: Tensor) -> tuple[Tensor, Tensor]:
    """Bring the last time of attention and the longest pause up to date.

    Parameters
    ----------
    attended
        From :func:`active`, queries in the order of time.
    times
        int64 ``[batch, count]``: positions of the queries.
    last, pause
        float32 ``[batch, kv_heads, entries]``: last time so far, and longest pause between two.

    Returns
    -------
    tuple
        Both after these queries.

    Source
    ------
    LazyEviction, arXiv 2506.15969: timestamp and maximum recurrence interval.
    """
    when = times.float()[:, None, :, None].expand_as(attended)
    seen = when.masked_fill(~attended, -1.0).cummax(2).values
    before = torch.cat([last[:, :, None], torch.maximum(seen[:, :, :-1], last[:, :, None])], dim=2)
    pauses = (when - before).masked_fill(~attended, 0.0).amax(2)
    return torch.maximum(last, seen[:, :, -1]), torch.maximum(pause, pauses)
