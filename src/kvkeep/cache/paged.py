"""Where entries live when heads hold different numbers of them: pages of a pool, in order, per head.

    head (row b, KV head h)   pages table[b, h, 0], table[b, h, 1] ...   entries 0 ... held[b, h] - 1

A head owns just the pages that its entries need. Lengths and tables are host numbers, so that attention
and eviction plan their reads without asking the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from kvkeep.cache.pages import PagePool
from kvkeep.core.arrays import BoolArray, IntArray
from kvkeep.core.decision import KeepDecision
from kvkeep.core.errors import CacheIntegrityError
from kvkeep.kernels import paged_move


class PagedStore:
    """Keys, values and positions of one layer.

    Parameters
    ----------
    pool
        Where the pages come from; shared with other layers.
    batch, heads
        Rows and KV heads.
    """

    def __init__(self, pool: PagePool, batch: int, heads: int) -> None:
        self.pool = pool
        self.table: IntArray = np.zeros((batch, heads, 0), np.int32)
        self.held: IntArray = np.zeros((batch, heads), np.int64)
        pool.stores.append(self)

    @property
    def batch(self) -> int:
        """Rows."""
        return len(self.held)

    @property
    def heads(self) -> int:
        """KV heads."""
        return self.held.shape[1]

    @property
    def longest(self) -> int:
        """Most entries of any head."""
        return int(self.held.max(initial=0))

    @property
    def memory(self) -> PagePool:
        """What holds the tensors."""
        return self.pool

    @property
    def memories(self) -> tuple[PagePool]:
        """The same, as one of possibly several."""
        return (self.pool,)

    @property
    def device(self) -> torch.device:
        """Where the entries are."""
        return self.pool.keys.device

    @property
    def extras(self) -> Sequence[str]:
        """Names of what is kept beside keys, values and positions."""
        return tuple(self.pool.extras)

    # -- where things are -------------------------------------------------------------------------

    def _pages(self, entries: IntArray) -> IntArray:
        return -(-entries // self.pool.page_size)

    def owned(self) -> tuple[BoolArray, IntArray]:
        """Where the table names pages (bool, its shape), and those pages, row by row, head by head."""
        where = np.arange(self.table.shape[2]) < self._pages(self.held)[..., None]
        return where, self.table[where]

    def _slots(self, rows: IntArray, heads: IntArray, entries: IntArray) -> IntArray:
        """Slots of the pool that hold these entries of these heads (arrays that broadcast)."""
        size = self.pool.page_size
        return self.table[rows, heads, entries // size].astype(np.int64) * size + entries % size

    def _index(self, slots: IntArray) -> Tensor:
        return paged_move.upload(slots, self.device)

    def _set_held(self, held: IntArray) -> None:
        """Change the lengths: take the pages that are missing, give back those that are too many."""
        had, need = self._pages(self.held), self._pages(held)
        nth = np.arange(max(int(need.max(initial=0)), self.table.shape[2]))
        if len(nth) > self.table.shape[2]:
            wider = np.zeros((*self.held.shape, len(nth)), np.int32)
            wider[..., : self.table.shape[2]] = self.table
            self.table = wider
        surplus = (nth >= need[..., None]) & (nth < had[..., None])
        self.pool.give_back(self.table[surplus])
        self.table[surplus] = 0
        missing = (nth >= had[..., None]) & (nth < need[..., None])
        self.table[missing] = self.pool.take(int(missing.sum()))
        self.held = held

    # -- writing ----------------------------------------------------------------------------------

    def append(
        self,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        fresh: Sequence[int],
        extras: dict[str, Tensor] | None = None,
    ) -> None:
        """Store new tokens behind each head's entries.

        Parameters
        ----------
        keys, values
            ``[batch, kv_heads, new, dim]``.
        positions
            int64 ``[batch, new]``.
        fresh
            How many of the last columns are real, per row; the columns before are left padding.
        extras
            float32 ``[batch, kv_heads, new]`` by name; those left out start at zero.
        """
        new, count = keys.shape[2], np.asarray(fresh)
        before = self.held
        self._set_held(before + count[:, None])
        # rank: place of each column among the row's new tokens; negative for padding
        rank = np.arange(new) - (new - count[:, None])
        real = np.broadcast_to((rank >= 0)[:, None], (self.batch, self.heads, new))
        rows, heads, columns = np.nonzero(real)
        slots = self._slots(rows, heads, before[rows, heads] + rank[rows, columns])
        source = None if real.all() else np.flatnonzero(real)
        given = {"keys": keys, "values": values, "positions": positions[:, None].expand(-1, self.heads, -1)}
        given |= {f"extra.{name}": extra for name, extra in (extras or {}).items()}
        paged_move.append(self.pool.slots(), given, slots, source)

    def add_extra(self, name: str, amount: Tensor, rows: Sequence[int] | None = None) -> None:
        """Add float32 ``[rows, kv_heads, entries]`` to a number that is kept per entry."""
        where, slots = self._padded(amount.shape[2], rows)
        stored = torch.from_numpy(where).to(self.device)
        self.pool.slots()[f"extra.{name}"].index_add_(0, self._index(slots[where]), amount[stored].float())

    def set_newest(self, name: str, values: Tensor) -> None:
        """Set a number kept per entry, ``[batch, kv_heads, newest]``, for the newest of every head."""
        newest = values.shape[2]
        rows, heads, columns = np.indices((self.batch, self.heads, newest)).reshape(3, -1)
        slots = self._index(self._slots(rows, heads, self.held[rows, heads] - newest + columns))
        self.pool.slots()[f"extra.{name}"].index_copy_(0, slots, values.reshape(-1).float())

    def compact(self, rows: Sequence[int], decision: KeepDecision) -> None:
        """Move the kept entries of some rows to their first slots, in order; free the pages behind.

        Parameters
        ----------
        rows
            Rows that the decision speaks of, in its order.
        decision
            Indices into the rows' entries; each head may keep another number. Its lengths are read from
            the device.
        """
        index, lengths = np.asarray(rows), decision.lengths.cpu().numpy()
        size = self.pool.page_size
        paged_move.move(self.pool.slots(), self.table[index], decision.indices, lengths, size)
        held = self.held.copy()
        held[index] = lengths
        self._set_held(held)

    def set_values(self, rows: Sequence[int], values: Tensor) -> None:
        """Replace the values of all entries of some rows.

        Parameters
        ----------
        values
            ``[rows, kv_heads, entries, value_dim]``; what lies behind a head's length is ignored.
        """
        where, slots = self._padded(values.shape[2], rows)
        stored = torch.from_numpy(where).to(self.device)
        self.pool.slots()["values"].index_copy_(0, self._index(slots[where]), values[stored])

    def write(self, rows: Sequence[int], entries: Mapping[str, Tensor], held: IntArray) -> None:
        """Replace everything that some rows hold.

        Parameters
        ----------
        rows
            Whose entries.
        entries
            ``[rows, kv_heads, entries, ...]`` by name, as :meth:`padded` names them.
        held
            int ``[rows, kv_heads]``: how many of them count.
        """
        index, lengths = np.asarray(rows), self.held.copy()
        lengths[index] = held
        self._set_held(lengths)
        width = next(iter(entries.values())).shape[2]
        where, slots = self._padded(width, rows)
        source, target = self._index(np.flatnonzero(where)), self._index(slots[where])
        for name, tensor in self.pool.slots().items():
            tensor.index_copy_(0, target, entries[name].flatten(0, 2).index_select(0, source))

    def forget_newest(self, removed: int) -> None:
        """Forget the newest ``removed`` entries of every head."""
        self._set_held(self.held - removed)

    def select_rows(self, index: Sequence[int]) -> None:
        """Keep the rows ``index``, in that order; the pages of a repeated row are copied."""
        chosen, pool = np.asarray(index, np.int64), self.pool
        _, pages = self.owned()
        had = np.zeros(pool.capacity + 1, bool)
        self.table, self.held = self.table[chosen], self.held[chosen]
        where, wanted = self.owned()
        _, first = np.unique(wanted, return_index=True)
        repeated = np.ones(len(wanted), bool)
        repeated[first] = False
        had[pages] = True
        had[wanted] = False
        pool.give_back(np.flatnonzero(had))
        copies = pool.take(int(repeated.sum()))
        source, target = self._index(wanted[repeated]), self._index(copies)
        for tensor in pool.tensors().values():
            tensor.index_copy_(0, target, tensor.index_select(0, source))
        wanted[repeated] = copies
        self.table[where] = wanted

    # -- reading ----------------------------------------------------------------------------------

    def _padded(self, entries: int, rows: Sequence[int] | None = None) -> tuple[BoolArray, IntArray]:
        """Where heads hold an entry, bool ``[rows, kv_heads, entries]``, and its slot (0 elsewhere)."""
        index = np.arange(self.batch) if rows is None else np.asarray(rows)
        return paged_move.places(self.table[index], self.held[index], entries, self.pool.page_size)

    def padded(self, rows: Sequence[int] | None = None, *names: str) -> dict[str, Tensor]:
        """Copies of what is stored, every head as long as the longest of these rows; zeros behind.

        Parameters
        ----------
        rows
            Which rows, ``None`` for all.
        names
            Of ``keys``, ``values``, ``positions``, ``extra.NAME``; none for all of them.

        Returns
        -------
        dict
            ``[rows, kv_heads, entries, ...]`` by name.
        """
        index = np.arange(self.batch) if rows is None else np.asarray(rows)
        entries = int(self.held[index].max(initial=0))
        slots = self.pool.slots()
        chosen = {name: slots[name] for name in (names or slots)}
        return paged_move.gather(chosen, self.table[index], self.held[index], entries, self.pool.page_size)

    def valid(self, entries: int, rows: Sequence[int] | None = None) -> Tensor:
        """bool ``[rows, kv_heads, entries]``: slots that hold an entry."""
        held = self.held if rows is None else self.held[np.asarray(rows)]
        return torch.from_numpy(np.arange(entries) < held[..., None]).to(self.device)

    def packed(self) -> dict[str, Tensor]:
        """All entries without a gap, row by row, head by head: ``[total, ...]`` by name."""
        slots = self._index(self._every_slot())
        return {name: tensor.index_select(0, slots) for name, tensor in self.pool.slots().items()}

    def unpack(self, entries: dict[str, Tensor], held: IntArray) -> None:
        """Fill an empty store with what :meth:`packed` returned."""
        self._set_held(np.asarray(held, np.int64))
        slots, tensors = self._index(self._every_slot()), self.pool.slots()
        for name, tensor in entries.items():
            tensors[name].index_copy_(0, slots, tensor)

    def _every_slot(self) -> IntArray:
        where, slots = self._padded(self.longest)
        return slots[where]

    def check_positions(self) -> None:
        """Verify that positions ascend in every head (reads the device).

        Raises
        ------
        CacheIntegrityError
            If they do not.
        """
        stored = self.padded(None, "positions")["positions"]
        valid = self.valid(stored.shape[2])
        if bool(((stored[..., 1:] <= stored[..., :-1]) & valid[..., 1:]).any()):
            raise CacheIntegrityError("the positions of a paged layer do not ascend.")

    def check_integrity(self) -> None:
        """Verify the whole pool that this layer draws from (reads the device)."""
        self.pool.check_integrity()
