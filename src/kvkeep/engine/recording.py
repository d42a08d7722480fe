"""What the engine writes down for policies that ask: newest queries, received attention, query moments."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvkeep.core.view import QueryMoments, Rope
from kvkeep.kernels.rotation import unrotate
from kvkeep.scoring.recurrence import active, recurrence
from kvkeep.scoring.window_attention import window_attention

# Upper bound of the elements of one block of attention probabilities while a prompt is summed.
_BLOCK_ELEMENTS = 1 << 24


class QueryRing:
    """The newest ``window`` rotated queries of one layer, overwritten in a circle.

    Parameters
    ----------
    like
        Queries ``[batch, heads, *, head_dim]``: shape, dtype and device.
    window
        Queries to hold.
    """

    @torch.inference_mode(False)  # see DenseStore
    def __init__(self, like: Tensor, window: int) -> None:
        batch, heads, _, dim = like.shape
        self.queries = like.new_zeros(batch, heads, window, dim)
        self.positions = torch.full((batch, window), -1, device=like.device)
        self.window, self.head = window, 0

    def push(self, queries: Tensor, positions: Tensor) -> None:
        """Write new queries ``[batch, heads, new, head_dim]`` and their positions ``[batch, new]``."""
        new = queries.shape[2]
        if new >= self.window:
            self.queries.copy_(queries[:, :, new - self.window :])
            self.positions.copy_(positions[:, new - self.window :])
            self.head = 0
            return
        tail = min(new, self.window - self.head)
        end = self.head + tail
        self.queries[:, :, self.head : end].copy_(queries[:, :, :tail])
        self.positions[:, self.head : end].copy_(positions[:, :tail])
        if tail < new:
            self.queries[:, :, : new - tail].copy_(queries[:, :, tail:])
            self.positions[:, : new - tail].copy_(positions[:, tail:])
        self.head = (self.head + new) % self.window

    def ordered(self) -> tuple[Tensor, Tensor]:
        """Queries and positions, oldest first."""
        if self.head == 0:
            return self.queries, self.positions
        return (
            torch.cat([self.queries[:, :, self.head :], self.queries[:, :, : self.head]], dim=2),
            torch.cat([self.positions[:, self.head :], self.positions[:, : self.head]], dim=1),
        )

    def forget(self, removed: int, lens: Sequence[int]) -> None:
        """Invalidate the newest ``removed`` queries: those at or behind each row's new length."""
        limit = torch.tensor(list(lens), device=self.positions.device)[:, None]
        self.positions.masked_fill_(self.positions >= limit, -1)
        # Their slots are the next to be written, so that the valid queries before them stay.
        self.head = (self.head - removed) % self.window

    @torch.inference_mode(False)
    @torch.no_grad()
    def select_rows(self, index: Tensor) -> None:
        """Keep the rows ``index``, in that order."""
        self.queries = self.queries.index_select(0, index)
        self.positions = self.positions.index_select(0, index)


def attention_received(
    queries: Tensor,
    query_positions: Tensor,
    keys: Tensor,
    positions: Tensor | None = None,
    valid: Tensor | None = None,
) -> Tensor:
    """Sum of the attention that each entry receives from some queries, mean over the group.

    Exact for queries whose visible entries are all still stored. Long prompts are summed in blocks, so
    the attention matrix never exists as a whole.

    Parameters
    ----------
    queries, query_positions
        ``[batch, heads, count, head_dim]`` and int64 ``[batch, count]``.
    keys
        ``[batch, kv_heads, entries, head_dim]``.
    positions, valid
        ``[batch, kv_heads, entries]``; leave both out if every slot holds an entry and the last ``count``
        are the queries' own tokens, in order: then nothing newer than a query is even read.

    Returns
    -------
    Tensor
        float32 ``[batch, kv_heads, entries]``.
    """
    batch, heads, count, _ = queries.shape
    entries = keys.shape[2]
    block = max(1, _BLOCK_ELEMENTS // (batch * heads * entries))
    total = torch.zeros(keys.shape[:3], device=keys.device)
    for start in range(0, count, block):
        part = slice(start, min(start + block, count))
        seen = entries if positions is not None else entries - count + part.stop
        total[:, :, :seen] += window_attention(
            queries[:, :, part],
            query_positions[:, part],
            keys[:, :, :seen],
            positions,
            valid,
            window_reduce="sum",
            causal=True,
        )
    return total


def recurrences(
    queries: Tensor,
    query_positions: Tensor,
    keys: Tensor,
    positions: Tensor,
    valid: Tensor,
    last: Tensor,
    pause: Tensor,
    threshold: float,
) -> tuple[Tensor, Tensor]:
    """Last time of attention and longest pause after some queries, in blocks of them.

    Parameters
    ----------
    queries, query_positions, keys, positions, valid, threshold
        As for :func:`~kvkeep.scoring.recurrence.active`.
    last, pause
        As for :func:`~kvkeep.scoring.recurrence.recurrence`.
    """
    batch, heads, count, _ = queries.shape
    block = max(1, _BLOCK_ELEMENTS // (batch * heads * keys.shape[2]))
    for start in range(0, count, block):
        part = slice(start, min(start + block, count))
        times = query_positions[:, part]
        attended = active(queries[:, :, part], times, keys, positions, valid, threshold)
        last, pause = recurrence(attended, times, last, pause)
    return last, pause


class MomentSums:
    """Running first and second moments of un-rotated queries.

    Parameters
    ----------
    like
        Queries ``[batch, heads, *, head_dim]``.
    rope
        To turn queries back.
    skip
        First positions that are left out (attention sinks distort them).

    Notes
    -----
    Sums run over the distance to each row's first queries: where a model adds a large bias to its
    queries, squares of the queries themselves would drown the covariance in rounding.
    """

    STATE = ("count", "origin", "total", "outer")

    @torch.inference_mode(False)
    def __init__(self, like: Tensor, rope: Rope, skip: int = 4) -> None:
        batch, heads, _, dim = like.shape
        self.rope, self.skip = rope, skip
        self.count = torch.zeros(batch, device=like.device)
        self.origin = torch.zeros(batch, heads, dim, device=like.device)
        self.total = torch.zeros(batch, heads, dim, device=like.device)
        self.outer = torch.zeros(batch, heads, dim, dim, device=like.device)

    def add(self, queries: Tensor, positions: Tensor) -> None:
        """Add rotated queries ``[batch, heads, new, head_dim]`` at positions ``[batch, new]``."""
        counted = positions >= self.skip
        outside = ~counted[:, None, :, None]
        plain = unrotate(queries.float(), positions, self.rope).masked_fill(outside, 0.0)
        new = counted.sum(-1)
        first = ((self.count == 0) & (new > 0))[:, None, None]
        self.origin = torch.where(first, plain.sum(2) / new.clamp(min=1)[:, None, None], self.origin)
        centred = (plain - self.origin[:, :, None]).masked_fill(outside, 0.0)
        self.count += new
        self.total += centred.sum(2)
        self.outer += centred.transpose(-1, -2) @ centred

    def moments(self) -> QueryMoments:
        """Mean and population covariance."""
        count = self.count.clamp(min=1)[:, None, None]
        mean = self.total / count
        covariance = self.outer / count[..., None] - mean[..., None] * mean[..., None, :]
        return QueryMoments(self.origin + mean, covariance)

    @torch.inference_mode(False)
    @torch.no_grad()
    def select_rows(self, index: Tensor) -> None:
        """Keep the rows ``index``, in that order."""
        for name in self.STATE:
            setattr(self, name, getattr(self, name).index_select(0, index))
