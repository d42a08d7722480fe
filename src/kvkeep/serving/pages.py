"""One layer's cache in vLLM's blocks, read and tidied for a policy: the worker's storage."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvkeep.core.errors import CacheIntegrityError
from kvkeep.serving.layout import Layout


class LayerPages:
    """Keys, values, positions and recorded queries of one layer.

    A page is one block of one KV head: page ``block * kv_heads + head``. What a head of a request holds is a
    list of pages, its row of a table; where all heads are equally long these are its blocks' own.

    Parameters
    ----------
    cache
        ``[blocks, kv_heads, slots, 2 * dim]``, contiguous.
    layout
        Of its pages.
    heads
        Query heads.
    per_block
        Recorded queries that one block has room for.

    Notes
    -----
    Positions stand beside the cache, by page and slot, so they need no request: a page has one owner, and
    what a new owner finds in it is overwritten before it is read. Recorded queries lie in blocks that the
    request owns in front of its slots, so they come and go with it.
    """

    def __init__(self, cache: Tensor, layout: Layout, heads: int, per_block: int) -> None:
        self.cache, self.layout = cache, layout
        self.blocks, self.kv_heads, self.slots, width = cache.shape
        self.dim, self.heads = width // 2, heads
        pages = self.blocks * self.kv_heads
        self._pages = cache.view(pages, 2 * self.slots * self.dim)
        self.positions = torch.zeros((pages, self.slots), dtype=torch.int32, device=cache.device)
        self._ring: Tensor | None = None
        if per_block:
            room = cache.view(self.blocks, -1)[:, : per_block * heads * self.dim]
            self._ring = room.unflatten(1, (per_block, heads, self.dim))

    def by_page(self) -> Tensor:
        """The cache as ``[pages, 1, slots, 2 * dim]``: every page a block with one KV head."""
        return self.cache.view(-1, 1, *self.cache.shape[2:])

    def table(self, blocks: Tensor) -> Tensor:
        """The pages ``[rows, kv_heads, count]`` of heads with equal shares of blocks ``[rows, count]``."""
        heads = torch.arange(self.kv_heads, device=blocks.device)[:, None]
        return blocks[:, None] * self.kv_heads + heads

    def read(self, name: str, table: Tensor) -> Tensor:
        """Entries of heads, in the order of their slots.

        Parameters
        ----------
        name
            ``"keys"`` or ``"values"``.
        table
            int64 ``[rows, kv_heads, count]``.

        Returns
        -------
        Tensor
            ``[rows, kv_heads, count * slots, dim]``.
        """
        offsets = self.layout.keys if name == "keys" else self.layout.values
        view = offsets.view(self._pages)
        if view is None:
            return self._pages[table][..., offsets.at.flatten()].view(*table.shape[:2], -1, self.dim)
        return view[table].flatten(2, 3)

    def read_positions(self, table: Tensor) -> Tensor:
        """int64 ``[rows, kv_heads, count * slots]``: what :meth:`write_positions` wrote."""
        return self.positions[table].flatten(2).long()

    def write_positions(self, table: Tensor, positions: Tensor) -> None:
        """Note the positions ``[rows, kv_heads, count * slots]`` of whole pages."""
        self.positions[table] = positions.view(*table.shape, self.slots).int()

    def move(self, table: Tensor, source: Tensor, target: Tensor) -> None:
        """Move entries of heads to other slots of theirs; all reads come before all writes.

        Parameters
        ----------
        table
            int64 ``[rows, kv_heads, count]``.
        source, target
            int64 ``[rows, kv_heads, moves]``: slots of the head.
        """
        (from_page, from_slot), (to_page, to_slot) = (self._place(table, at) for at in (source, target))
        for offsets in (self.layout.keys, self.layout.values):
            if offsets.rows is not None:
                first, step = offsets.rows
                origin = (from_page * 2 * self.slots + first + from_slot * step).flatten()
                goal = (to_page * 2 * self.slots + first + to_slot * step).flatten()
                rows = self.cache.view(-1, self.dim)
                rows.index_copy_(0, goal, rows.index_select(0, origin))
            else:
                numbers = self._pages[from_page[..., None], offsets.at[from_slot]]
                self._pages[to_page[..., None], offsets.at[to_slot]] = numbers

    def _place(self, table: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        return table.gather(-1, at // self.slots), at % self.slots

    # -- recorded queries -------------------------------------------------------------------------

    def record(self, blocks: Tensor, places: Tensor, queries: Tensor) -> None:
        """Write queries ``[tokens, heads, dim]`` at places of blocks, both int64 ``[tokens]``."""
        self._room()[blocks, places] = queries

    def recorded(self, blocks: Tensor, places: Tensor) -> Tensor:
        """Queries ``[rows, heads, window, dim]`` at places of blocks, both int64 ``[rows, window]``."""
        return self._room()[blocks, places].transpose(1, 2)

    def _room(self) -> Tensor:
        if self._ring is None:
            raise CacheIntegrityError("this layer has no room for queries: its policy did not ask for any.")
        return self._ring


class OrderedPages:
    """Entries of some rows in the order of their positions: what a view fetches when it is read.

    Parameters
    ----------
    pages
        The layer.
    table
        int64 ``[rows, kv_heads, count]``.
    order
        int64 ``[rows, kv_heads, entries]``: slots, oldest entry first.
    """

    def __init__(self, pages: LayerPages, table: Tensor, order: Tensor) -> None:
        self._pages, self._table, self._order = pages, table, order

    def padded(self, rows: Sequence[int] | None = None, *names: str) -> dict[str, Tensor]:
        """Keys or values ``[rows, kv_heads, entries, dim]`` by name."""
        found = {}
        for name in names:
            entries = self._pages.read(name, self._table)
            lines = (
                torch.arange(entries.shape[0] * entries.shape[1], device=entries.device) * entries.shape[2]
            )
            index = self._order + lines.view(*entries.shape[:2], 1)
            # Whole entries are picked, which copies many times faster than number by number.
            picked = entries.reshape(-1, entries.shape[-1]).index_select(0, index.flatten())
            found[name] = picked.view(*index.shape, -1)
        return found
