"""Attention that the newest queries pay to each stored entry: the score of SnapKV and its kin."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

GroupReduce = Literal["prob_mean", "logit_max", "logit_mean"]
WindowReduce = Literal["mean", "sum", "max"]
Pool = Literal["none", "avg", "max"]


def window_attention(
    queries: Tensor,
    query_positions: Tensor,
    keys: Tensor,
    positions: Tensor,
    among: Tensor,
    *,
    group_reduce: GroupReduce = "prob_mean",
    window_reduce: WindowReduce = "mean",
    pool: Pool = "none",
    kernel: int = 5,
    temperature: float = 1.0,
    causal: bool = False,
) -> Tensor:
    """Softmax attention of a window of queries over a set of entries, reduced to one number each.

    Parameters
    ----------
    queries
        ``[batch, heads, window, head_dim]``, rotated.
    query_positions
        int64 ``[batch, window]``; queries at -1 do not count.
    keys
        ``[batch, kv_heads, entries, head_dim]``, rotated.
    positions
        int64 ``[batch, kv_heads, entries]``, used by ``causal``.
    among
        bool, shape of ``positions``: the entries inside the softmax; the others score 0.
    group_reduce
        How the query heads of a KV head are merged: mean of probabilities, or maximum or mean of
        logits before the softmax.
    window_reduce
        How the queries of the window are merged.
    pool, kernel
        Smoothing along the entries, stride 1, padded with zeros that count in the average.
    temperature
        Divides the logits, which are always divided by sqrt(head_dim).
    causal
        Hide entries that are newer than the query; needed when ``among`` reaches into the window.

    Returns
    -------
    Tensor
        float32 ``[batch, kv_heads, entries]``, not negative.
    """
    batch, heads, window, dim = queries.shape
    kv_heads, entries = keys.shape[1], keys.shape[2]
    group = heads // kv_heads
    grouped = queries.reshape(batch, kv_heads, group * window, dim) * (1.0 / (math.sqrt(dim) * temperature))
    logits = torch.matmul(grouped, keys.transpose(-1, -2)).float()
    hidden = ~among[:, :, None, :]
    if causal:
        times = query_positions.repeat(1, group)[:, None, :, None]
        hidden = hidden | (positions[:, :, None, :] > times)
    if group_reduce != "prob_mean":
        split = logits.view(batch, kv_heads, group, window, entries)
        logits = split.amax(2) if group_reduce == "logit_max" else split.mean(2)
        hidden, group = hidden[:, :, :window], 1
    probs = logits.masked_fill_(hidden, float("-inf")).softmax(-1)
    seen = (query_positions >= 0).repeat(1, group)[:, None, :, None]
    # A query that sees nothing has no softmax (NaN); it says nothing about any entry.
    probs = probs.masked_fill_(hidden | ~seen, 0.0)
    if window_reduce == "max":
        reduced = probs.view(batch, kv_heads, group, window, entries).amax(3).mean(2)
    else:
        reduced = probs.sum(2) / group
        if window_reduce == "mean":
            reduced = reduced / (query_positions >= 0).sum(-1).clamp(min=1)[:, None, None]
    return smooth(reduced, pool, kernel).masked_fill(~among, 0.0)


def smooth(scores: Tensor, pool: Pool, kernel: int) -> Tensor:
    """Pool scores ``[batch, kv_heads, entries]`` along the entries (stride 1, zero padding counted)."""
    if pool == "avg":
        return F.avg_pool1d(scores, kernel, stride=1, padding=kernel // 2)
    if pool == "max":
        return F.max_pool1d(scores, kernel, stride=1, padding=kernel // 2)
    return scores
