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

# Hides an entry from a softmax; float32 keeps it finite when logits are added to it.
_LOW = -1e30

# Probabilities that exist at a time. On a CPU a megabyte: the allocator hands larger blocks back to
# the system, and fetching their pages anew each time costs as much as the attention itself.
_LARGEST_ON_CPU, _LARGEST = 1 << 20, 1 << 25


def window_attention(
    queries: Tensor,
    query_positions: Tensor,
    keys: Tensor,
    positions: Tensor | None,
    among: Tensor | None,
    *,
    group_reduce: GroupReduce = "prob_mean",
    window_reduce: WindowReduce = "mean",
    pool: Pool = "none",
    kernel: int = 5,
    temperature: float = 1.0,
    causal: bool = False,
    stop: int | None = None,
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
        Integers ``[batch, kv_heads, entries]``, used by ``causal``; ``None`` says that the last ``window``
        entries are the queries' own tokens, in order.
    among
        bool, shape of ``positions``: the entries inside the softmax; the others score 0. ``None`` is all.
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
    stop
        Shortcut, known on the host: ``among`` is just the entries before this slot.

    Returns
    -------
    Tensor
        float32 ``[batch, kv_heads, entries]``, not negative.
    """
    entries = keys.shape[2]
    if stop is not None:
        keys, among = keys[:, :, :stop], None
        positions = positions[:, :, :stop] if positions is not None else None
    largest = _LARGEST_ON_CPU if keys.device.type == "cpu" else _LARGEST
    rows = max(1, largest // (queries.shape[1] * queries.shape[2] * max(1, keys.shape[2])))
    reduced = torch.cat(
        [
            _attend(
                queries[first : first + rows],
                query_positions[first : first + rows],
                keys[first : first + rows],
                None if positions is None else positions[first : first + rows],
                None if among is None else among[first : first + rows],
                group_reduce=group_reduce,
                window_reduce=window_reduce,
                temperature=temperature,
                causal=causal,
            )
            for first in range(0, queries.shape[0], rows)
        ]
    )
    reduced = smooth(reduced, pool, kernel)
    if among is not None:
        reduced = reduced.masked_fill(~among, 0.0)
    return reduced if stop is None else F.pad(reduced, (0, entries - stop))


def _attend(
    queries: Tensor,
    query_positions: Tensor,
    keys: Tensor,
    positions: Tensor | None,
    among: Tensor | None,
    *,
    group_reduce: GroupReduce,
    window_reduce: WindowReduce,
    temperature: float,
    causal: bool,
) -> Tensor:
    batch, heads, window, dim = queries.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    # float32 whatever the cache holds: in half precision close logits would tie or change places.
    grouped = queries.float().reshape(batch, kv_heads, group * window, dim)
    logits = torch.matmul(grouped * (1.0 / (math.sqrt(dim) * temperature)), keys.float().transpose(-1, -2))
    if group_reduce != "prob_mean":
        split = logits.unflatten(2, (group, window))
        logits, group = (split.amax(2) if group_reduce == "logit_max" else split.mean(2)), 1
    hide(logits.unflatten(2, (group, window)), query_positions, positions, among, causal)
    probs = logits.softmax(-1)
    weights = _query_weights(query_positions, window_reduce, group)
    if window_reduce == "max":
        return (probs * weights[:, None, :, None]).unflatten(2, (group, window)).amax(3).mean(2)
    return torch.matmul(weights[:, None, None], probs).squeeze(2)


def hide(
    logits: Tensor, query_positions: Tensor, positions: Tensor | None, among: Tensor | None, causal: bool
) -> None:
    """Lower the logits ``[batch, kv_heads, group, window, entries]`` of what a query must not see.

    Adding a very low number is an order of magnitude faster than filling by mask, and unlike -inf it leaves
    no NaN behind where a query sees nothing.
    """
    if causal and positions is None:
        window = logits.shape[3]
        own = torch.full((window, window), _LOW, device=logits.device).triu(1)
        logits[..., -window:].add_(own)
    elif causal and positions is not None:
        when = positions.float()
        if among is not None:
            when = when.masked_fill(~among, float("inf"))
        newer = when[:, :, None] - query_positions.float()[:, None, :, None]
        logits.add_(newer.clamp_(0, 1).mul_(_LOW)[:, :, None])
    elif among is not None:
        bias = torch.zeros(among.shape, device=logits.device).masked_fill_(~among, _LOW)
        logits.add_(bias[:, :, None, None])


def _query_weights(query_positions: Tensor, window_reduce: WindowReduce, group: int) -> Tensor:
    """What each query of the group counts in the reduction: float32 ``[batch, group * window]``."""
    seen = (query_positions >= 0).float()
    if window_reduce == "max":
        return seen.repeat(1, group)
    if window_reduce == "mean":
        seen = seen / seen.sum(-1, keepdim=True).clamp(min=1)
    return seen.repeat(1, group) / group


def smooth(scores: Tensor, pool: Pool, kernel: int) -> Tensor:
    """Pool scores ``[batch, kv_heads, entries]`` along the entries (stride 1, zero padding counted)."""
    if pool == "avg":
        return F.avg_pool1d(scores, kernel, stride=1, padding=kernel // 2)
    if pool == "max":
        return F.max_pool1d(scores, kernel, stride=1, padding=kernel // 2)
    return scores
