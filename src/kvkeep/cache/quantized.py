"""Entries in two precisions: those that matter as they are, the others in few bits.

    low     entries written down in few bits, oldest first     uint8 rows of kvkeep.kernels.few_bits
    full    the others, oldest first; new tokens behind        the model's own type

Both parts are ordinary stores of one kind, dense or paged; in ``low`` the bytes of a vector stand where
keys and values stand elsewhere. Together they look like one store whose entries ascend by position, with the
values that attention gets to see: what a policy is shown is what the model works with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from kvkeep.cache.dense import DenseStore
from kvkeep.cache.paged import PagedStore
from kvkeep.cache.store import Memory
from kvkeep.core.arrays import FloatArray, IntArray
from kvkeep.core.decision import KeepCounts, KeepDecision
from kvkeep.core.errors import CacheIntegrityError
from kvkeep.core.precision import Precision
from kvkeep.kernels import few_bits

# Behind every position: empty slots are sorted to the end.
_NOWHERE = 2**31 - 1

Part = TypeVar("Part", DenseStore, PagedStore)


class MixedStore(Generic[Part]):
    """Keys, values and positions of one layer.

    Parameters
    ----------
    full, low
        Empty stores of one kind; ``low`` was laid out with :func:`low_rows`.
    precision
        Bits and groups.
    """

    def __init__(self, full: Part, low: Part, precision: Precision) -> None:
        self.full: Part = full
        self.low: Part = low
        self.precision = precision

    # -- what it holds ----------------------------------------------------------------------------

    @property
    def batch(self) -> int:
        """Rows."""
        return self.full.batch

    @property
    def heads(self) -> int:
        """KV heads."""
        return self.full.heads

    @property
    def held(self) -> IntArray:
        """Entries, ``[batch, kv_heads]``."""
        return self.full.held + self.low.held

    @property
    def weighed(self) -> FloatArray:
        """Entries in 16 bits that would take the same bytes of keys and values, ``[batch, kv_heads]``."""
        return self.full.held + self.precision.weight * self.low.held

    @property
    def longest(self) -> int:
        """Most entries of any head."""
        return int(self.held.max(initial=0))

    @property
    def memories(self) -> tuple[Memory, Memory]:
        """What holds the tensors of both parts."""
        return self.full.memory, self.low.memory

    @property
    def device(self) -> torch.device:
        """Where the entries are."""
        return self.full.device

    @property
    def extras(self) -> Any:
        """Names of what is kept beside keys, values and positions."""
        return self.full.extras

    def side_by_side(self, name: str, rows: Sequence[int] | None = None) -> Tensor:
        """The low entries, then the full ones, each part as long as its longest head."""
        exact: Tensor = self.full.padded(rows, name)[name]
        low: Tensor = self.low.padded(rows, name)[name]
        if name not in ("keys", "values"):
            return torch.cat([low, exact], 2)
        split = low.shape[2]
        both = exact.new_empty((*exact.shape[:2], split + exact.shape[2], exact.shape[3]))
        bits, group = self.precision.width(name), self.precision.group
        few_bits.decode(low, bits, group, exact.shape[3], exact.dtype, out=both[:, :, :split])
        both[:, :, split:].copy_(exact)
        return both

    def _valid(self, rows: Sequence[int] | None) -> tuple[Tensor, int]:
        """Which slots side by side hold an entry, and how many of them are low."""
        parts = [
            part.valid(_longest(part, rows), rows) for part in (self.low, self.full)
        ]  # as long as `padded` makes them
        return torch.cat(parts, 2), parts[0].shape[2]

    def order(self, rows: Sequence[int] | None = None) -> Tensor:
        """Slots side by side in the order of positions, int64 ``[rows, kv_heads, entries]``."""
        valid, _ = self._valid(rows)
        positions = self.side_by_side("positions", rows).masked_fill(~valid, _NOWHERE)
        return positions.argsort(dim=-1, stable=True)[..., : _longest(self, rows)]

    def is_low(self, rows: Sequence[int] | None = None) -> Tensor:
        """bool ``[rows, kv_heads, entries]``, shape of :meth:`padded`: which entries are in few bits."""
        valid, split = self._valid(rows)
        valid[..., split:] = False
        return valid.gather(-1, self.order(rows))

    def padded(self, rows: Sequence[int] | None = None, *names: str) -> dict[str, Tensor]:
        """Copies of what is stored, ascending by position, every head as long as the longest of these rows.

        Parameters
        ----------
        rows
            Which rows, ``None`` for all.
        names
            Of ``keys``, ``values``, ``positions``, ``extra.NAME``; none for all of them.

        Returns
        -------
        dict
            ``[rows, kv_heads, entries, ...]`` by name; what is in few bits has been read back.
        """
        wanted = names or tuple(self.full.memory.tensors())
        if not self.low.held.any():
            return self.full.padded(rows, *wanted)
        order = self.order(rows)
        return {name: _gather(self.side_by_side(name, rows), order) for name in wanted}

    def valid(self, entries: int, rows: Sequence[int] | None = None) -> Tensor:
        """bool ``[rows, kv_heads, entries]``: slots of :meth:`padded` that hold an entry."""
        held = self.held if rows is None else self.held[np.asarray(rows)]
        return torch.from_numpy(np.arange(entries) < held[..., None]).to(self.device)

    # -- numbers beside ---------------------------------------------------------------------------

    def add_extra(self, name: str, amount: Tensor) -> None:
        """Add float32 ``[batch, kv_heads, entries]`` to a number that is kept per entry."""
        if not self.low.held.any():
            self.full.add_extra(name, amount)
            return
        valid, split = self._valid(None)
        placed = torch.zeros(valid.shape, device=amount.device)
        placed.scatter_(-1, self.order()[..., : amount.shape[2]], amount.float())
        placed.masked_fill_(~valid, 0.0)
        self.low.add_extra(name, placed[..., :split])
        self.full.add_extra(name, placed[..., split:])

    def set_newest(self, name: str, values: Tensor) -> None:
        """Set a number kept per entry, ``[batch, kv_heads, newest]``; the newest are in full precision."""
        self.full.set_newest(name, values)

    def set_values(self, rows: Sequence[int], values: Tensor) -> None:
        """Replace the values of all entries of some rows.

        An entry in few bits is written down again, from the value given, unless it is the value that is
        read back: what does not change is not rounded twice.

        Parameters
        ----------
        values
            ``[rows, kv_heads, entries, value_dim]``, ascending by position; what lies behind a head's length
            is ignored.
        """
        old = self.side_by_side("values", rows)
        index = self.order(rows)[..., None].expand(-1, -1, -1, old.shape[3])
        new = old.scatter(2, index, values[:, :, : index.shape[2]])
        split = _longest(self.low, rows)
        self.full.set_values(rows, new[:, :, split:])
        if split:
            bits, group = self.precision.width("values"), self.precision.group
            changed = (new[:, :, :split] != old[:, :, :split]).any(-1, keepdim=True)
            bytes_now = self.low.padded(rows, "values")["values"]
            fresh = few_bits.encode(new[:, :, :split], bits, group)
            self.low.set_values(rows, torch.where(changed, fresh, bytes_now))

    # -- moving -----------------------------------------------------------------------------------

    def rearrange(
        self,
        rows: Sequence[int],
        kept: Tensor,
        protected: Tensor,
        make_room: Callable[[int, int], None] = lambda full, low: None,
    ) -> None:
        """Evict, demote and promote in one go.

        Parameters
        ----------
        rows
            Whose entries.
        kept, protected
            bool, shape of :meth:`padded`: what stays, and what of that is in full precision afterwards.
        make_room
            Called with the lengths that the two parts will have, before they are written.
        """
        order = self.order(rows)
        sides = {
            "full": {name: self.side_by_side(name, rows) for name in self.full.memory.tensors()},
            "low": {name: self._all_encoded(name, rows) for name in ("keys", "values")},
        }
        sides["low"] = {**sides["full"], **sides["low"]}
        written = {}
        for side, mask in (("full", kept & protected), ("low", kept & ~protected)):
            held = mask.sum(-1)
            longest = int(held.max())
            place = KeepDecision.from_mask(mask, KeepCounts(held, longest)).indices
            slots = order.gather(-1, place)
            entries = {name: _gather(tensor, slots) for name, tensor in sides[side].items()}
            written[side] = (entries, held.cpu().numpy(), longest)
        lengths = []
        for part, side in ((self.full, "full"), (self.low, "low")):
            others = np.delete(part.held, np.asarray(rows), axis=0)
            lengths.append(max(written[side][2], int(others.max(initial=0))))
        make_room(*lengths)
        for part, side in ((self.full, "full"), (self.low, "low")):
            part.write(rows, written[side][0], written[side][1])

    def _all_encoded(self, name: str, rows: Sequence[int]) -> Tensor:
        """Bytes of the low entries as they are, then of the full ones, written down now."""
        full = self.full.padded(rows, name)[name]
        fresh = few_bits.encode(full, self.precision.width(name), self.precision.group)
        return torch.cat([self.low.padded(rows, name)[name], fresh], 2)

    def forget_newest(self, removed: int) -> None:
        """Forget the newest ``removed`` entries of every head, which are in full precision."""
        self.full.forget_newest(removed)

    def select_rows(self, index: Sequence[int]) -> None:
        """Keep the rows ``index``, in that order, repeats allowed."""
        self.full.select_rows(index)
        self.low.select_rows(index)

    def check_integrity(self) -> None:
        """Verify both parts, and that no position is in both (reads the device).

        Raises
        ------
        CacheIntegrityError
            If they are not sound.
        """
        self.full.check_integrity()
        self.low.check_integrity()
        positions = self.padded(None, "positions")["positions"]
        again = positions[..., 1:] <= positions[..., :-1]
        if bool((again & self.valid(positions.shape[2])[..., 1:]).any()):
            raise CacheIntegrityError("an entry is stored both in full precision and in few bits.")


def low_rows(keys: Tensor, values: Tensor, precision: Precision) -> tuple[Tensor, Tensor]:
    """Empty tensors like the bytes of such keys and values: what to lay ``low`` out with."""

    def like(tensor: Tensor, kind: str) -> Tensor:
        width = few_bits.row_bytes(tensor.shape[-1], precision.width(kind), precision.group)
        return tensor.new_empty((*tensor.shape[:-2], 0, width), dtype=torch.uint8)

    return like(keys, "keys"), like(values, "values")


def _longest(store: DenseStore | PagedStore | MixedStore[Any], rows: Sequence[int] | None) -> int:
    held = store.held if rows is None else store.held[np.asarray(rows)]
    return int(held.max(initial=0))


def _gather(tensor: Tensor, index: Tensor) -> Tensor:
    """Entries ``index [rows, kv_heads, kept]`` of ``[rows, kv_heads, entries, ...]``."""
    if tensor.ndim == 3:
        return tensor.gather(2, index)
    return tensor.gather(2, index[..., None].expand(*index.shape, tensor.shape[-1]))
