"""Smallest and largest key of each block of entries, kept up to date as entries arrive."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvkeep.cache.dense import DenseStore

# Blocks are added in steps of this size.
_GROWTH = 16


class BlockIndex(Protocol):
    """What a layer keeps per block of entries for a selector."""

    def catch_up(self, store: DenseStore) -> None:
        """Take in the entries that were stored since the last call."""

    def show(self, query: Tensor, lens: Tensor, blocks: int) -> dict[str, Tensor]:
        """What a selector gets to see of the first so many blocks, by name.

        Parameters
        ----------
        query
            ``[batch, heads, 1, head_dim]`` of the newest token, rotated.
        lens
            int64 ``[batch]``: entries stored.
        """

    def forget(self, lens: Sequence[int]) -> None:
        """Rows are now so short; what came after is forgotten."""

    def select_rows(self, index: Tensor) -> None:
        """Keep the rows ``index``, in that order, repeats allowed."""

    @property
    def nbytes(self) -> int:
        """Bytes held."""


class BlockBounds:
    """Bounds of one layer, ``[batch, kv_heads, blocks, head_dim]``: inf and -inf where a block is empty.

    Parameters
    ----------
    like
        Keys ``[batch, kv_heads, *, head_dim]``: shape, dtype and device.
    block
        Entries of a block.
    """

    @torch.inference_mode(False)  # see DenseStore
    def __init__(self, like: Tensor, block: int) -> None:
        self.block = block
        self.seen = [0] * like.shape[0]  # entries taken in, per row
        self.low = like.new_full((*like.shape[:2], 0, like.shape[-1]), math.inf)
        self.high = -self.low

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.low.nbytes + self.high.nbytes

    def catch_up(self, store: DenseStore) -> None:
        """Take in the entries that were stored since the last call.

        A single new entry per row touches one block; more of them are reduced block by block.
        """
        self._make_room(-(-store.longest // self.block))
        new = [length - seen for length, seen in zip(store.lens, self.seen, strict=True)]
        if all(count == 1 for count in new):
            self._add_newest(store)
        elif any(new):
            self._reduce(store, min(seen for seen, count in zip(self.seen, new, strict=True) if count))
        self.seen = list(store.lens)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _make_room(self, blocks: int) -> None:
        missing = blocks - self.low.shape[2]
        if missing <= 0:
            return
        batch, heads, _, dim = self.low.shape
        fresh = self.low.new_full((batch, heads, -(-missing // _GROWTH) * _GROWTH, dim), math.inf)
        self.low, self.high = torch.cat([self.low, fresh], 2), torch.cat([self.high, -fresh], 2)

    def _add_newest(self, store: DenseStore) -> None:
        if store.even:
            slot = store.longest - 1
            key, place = store.keys[:, :, slot], slot // self.block
            low, high = self.low[:, :, place], self.high[:, :, place]
            torch.minimum(low, key, out=low)
            torch.maximum(high, key, out=high)
            return
        rows = torch.arange(store.batch, device=store.device)
        slots = torch.tensor(store.lens, device=store.device) - 1
        key, places = store.keys[rows, :, slots], slots // self.block
        self.low[rows, :, places] = torch.minimum(self.low[rows, :, places], key)
        self.high[rows, :, places] = torch.maximum(self.high[rows, :, places], key)

    def _reduce(self, store: DenseStore, start: int) -> None:
        """Compute every block from that of entry ``start`` on."""
        first, end = start // self.block, -(-store.longest // self.block)
        keys = store.keys[:, :, first * self.block : end * self.block]
        slots = torch.arange(first * self.block, end * self.block, device=store.device)
        stored = slots < torch.tensor(store.lens, device=store.device)[:, None]
        keys = torch.nn.functional.pad(keys, (0, 0, 0, len(slots) - keys.shape[2]))
        empty = ~stored[:, None, :, None]
        for bounds, fill, reduce in (
            (self.low, math.inf, torch.amin),
            (self.high, -math.inf, torch.amax),
        ):
            blocks = keys.masked_fill(empty, fill).unflatten(2, (-1, self.block))
            bounds[:, :, first:end] = reduce(blocks, dim=3)

    def show(self, query: Tensor, lens: Tensor, blocks: int) -> dict[str, Tensor]:
        """The bounds of the first so many blocks."""
        return {"low": self.low[:, :, :blocks], "high": self.high[:, :, :blocks]}

    def forget(self, lens: Sequence[int]) -> None:
        """Rows are now so short; their last block is computed again with the next entry."""
        for row, length in enumerate(lens):
            whole = min(length, self.seen[row]) // self.block
            self.low[row, :, whole:], self.high[row, :, whole:] = math.inf, -math.inf
            self.seen[row] = min(self.seen[row], whole * self.block)

    @torch.inference_mode(False)
    @torch.no_grad()
    def select_rows(self, index: Tensor) -> None:
        """Keep the rows ``index``, in that order, repeats allowed."""
        self.low, self.high = self.low.index_select(0, index), self.high.index_select(0, index)
        self.seen = [self.seen[row] for row in index.tolist()]
