"""One layer's cache in vLLM's blocks, read and tidied for a policy: the worker's storage."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvkeep.core.errors import CacheIntegrityError
from kvkeep.serving.layout import Layout


class LayerPages:
    """Keys, values, positions and recorded queries of one layer.

    Parameters
    ----------
    cache
        ``[blocks, kv_heads, slots, 2 * dim]``, one contiguous page per block and KV head.
    layout
        Of its pages.
    heads
        Query heads.
    per_block
        Recorded queries that one block has room for.

    Notes
    -----
    Positions stand beside the cache, by block, head and slot, so they need no request: a block has one
    owner, and what a new owner finds in it is overwritten before it is read. Recorded queries lie in blocks
    that the request owns in front of its slots, so they come and go with it.
    """

    def __init__(self, cache: Tensor, layout: Layout, heads: int, per_block: int) -> None:
        self.cache = cache
        self.blocks, self.kv_heads, self.slots, width = cache.shape
        self.dim, self.heads, self.layout = width // 2, heads, layout
        self._halves = cache.view(self.blocks, self.kv_heads, 2, self.slots * self.dim)
        self._flat = cache.view(self.blocks * self.kv_heads, 2 * self.slots * self.dim)
        self.positions = torch.zeros(
            (self.blocks, self.kv_heads, self.slots), dtype=torch.int32, device=cache.device
        )
        self._ring: Tensor | None = None
        if per_block:
            room = cache.view(self.blocks, -1)[:, : per_block * heads * self.dim]
            self._ring = room.unflatten(1, (per_block, heads, self.dim))

    @property
    def stock(self) -> tuple[Tensor, Tensor]:
        """Keys and values ``[blocks, kv_heads, slots, dim]`` as vLLM's kernels take them."""
        halves = self.cache.view(self.blocks, self.kv_heads, 2 * self.slots, self.dim).chunk(2, dim=2)
        return halves[0], halves[1]

    def read(self, name: str, blocks: Tensor) -> Tensor:
        """Entries of rows, in the order of their slots.

        Parameters
        ----------
        name
            ``"keys"`` or ``"values"``.
        blocks
            int64 ``[rows, count]``.

        Returns
        -------
        Tensor
            ``[rows, kv_heads, count * slots, dim]``.
        """
        half = 0 if name == "keys" else 1
        pages = self._halves[:, :, half][blocks]  # [rows, count, kv_heads, slots * dim]
        entries = self.layout.read(pages, self.layout.keys if half == 0 else self.layout.values)
        return entries.transpose(1, 2).flatten(2, 3)

    def read_positions(self, blocks: Tensor) -> Tensor:
        """int64 ``[rows, kv_heads, count * slots]``: what :meth:`write_positions` wrote."""
        return self.positions[blocks].transpose(1, 2).flatten(2, 3).long()

    def write_positions(self, blocks: Tensor, positions: Tensor) -> None:
        """Note the positions ``[rows, kv_heads, count * slots]`` of whole blocks ``[rows, count]``."""
        rows, count = blocks.shape
        self.positions[blocks] = positions.view(rows, self.kv_heads, count, self.slots).transpose(1, 2).int()

    def move(self, blocks: Tensor, source: Tensor, target: Tensor) -> None:
        """Move entries of rows to other slots of the same rows and heads; all reads come before all writes.

        Parameters
        ----------
        blocks
            int64 ``[rows, count]``.
        source, target
            int64 ``[rows, kv_heads, moves]``: slots of the row.
        """
        heads = torch.arange(self.kv_heads, device=blocks.device)[None, :, None]
        layout = self.layout

        def place(at: Tensor) -> tuple[Tensor, Tensor]:
            block = blocks.gather(1, (at // self.slots).flatten(1)).view_as(at)
            return (block * self.kv_heads + heads)[..., None], at % self.slots

        (from_page, from_slot), (to_page, to_slot) = place(source), place(target)
        half = self.slots * self.dim
        keys = self._flat[from_page, layout.keys[from_slot]]
        values = self._flat[from_page, half + layout.values[from_slot]]
        self._flat[to_page, layout.keys[to_slot]] = keys
        self._flat[to_page, half + layout.values[to_slot]] = values

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
    blocks
        int64 ``[rows, count]``.
    order
        int64 ``[rows, kv_heads, entries]``: slots, oldest entry first.
    """

    def __init__(self, pages: LayerPages, blocks: Tensor, order: Tensor) -> None:
        self._pages, self._blocks, self._order = pages, blocks, order

    def padded(self, rows: Sequence[int] | None = None, *names: str) -> dict[str, Tensor]:
        """Keys or values ``[rows, kv_heads, entries, dim]`` by name."""
        index = self._order[..., None]
        return {
            name: (read := self._pages.read(name, self._blocks)).gather(
                2, index.expand(-1, -1, -1, read.shape[-1])
            )
            for name in names
        }
