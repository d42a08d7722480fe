"""Where entries live when all heads of a layer hold equally many: one preallocated tensor.

    slot      0 ............ len(row) ............ capacity
    row b     | entries, oldest first | free        |

Each row is left-aligned and has its own length, so rows of a batch may be padded, evict at different
steps, or hold different numbers of entries. Slots are never zero-filled again: whoever reads beyond a
row's length must mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from kvkeep.core.arrays import IntArray
from kvkeep.core.decision import KeepDecision
from kvkeep.core.errors import CacheIntegrityError


class DenseStore:
    """Keys, values and positions of one layer.

    Parameters
    ----------
    like_keys, like_values
        Any keys ``[batch, kv_heads, *, head_dim]`` and values of the layer: shape, dtype and device.
    capacity
        Slots per row and head to allocate.
    extras
        Names of further float32 numbers to keep per entry (accumulated attention, log retention).
    """

    # NOTE: tensors born in inference mode could not be written to after it, in the next turn.
    @torch.inference_mode(False)
    def __init__(
        self, like_keys: Tensor, like_values: Tensor, capacity: int, extras: Sequence[str] = ()
    ) -> None:
        batch, heads = like_keys.shape[:2]
        self.keys = like_keys.new_zeros(batch, heads, capacity, like_keys.shape[-1])
        self.values = like_values.new_zeros(batch, heads, capacity, like_values.shape[-1])
        # Positions fit 32 bits; half the bytes of torch's default index type.
        self.positions = torch.zeros(batch, heads, capacity, dtype=torch.int32, device=like_keys.device)
        self.extras = {name: torch.zeros(batch, heads, capacity, device=like_keys.device) for name in extras}
        self.lens = [0] * batch

    @property
    def batch(self) -> int:
        """Rows."""
        return int(self.keys.shape[0])

    @property
    def heads(self) -> int:
        """KV heads."""
        return int(self.keys.shape[1])

    @property
    def held(self) -> IntArray:
        """Entries, ``[batch, kv_heads]``."""
        return self._held

    @property
    def memory(self) -> DenseStore:
        """What holds the tensors: this store itself."""
        return self

    @property
    def memories(self) -> tuple[DenseStore]:
        """The same, as one of possibly several."""
        return (self,)

    @property
    def device(self) -> torch.device:
        """Where the entries are."""
        return self.keys.device

    @property
    def capacity(self) -> int:
        """Slots per row and head."""
        return int(self.keys.shape[2])

    @property
    def lens(self) -> list[int]:
        """Entries per row; set as a whole, never in place."""
        return self._lens

    @lens.setter
    def lens(self, lens: Sequence[int]) -> None:
        self._lens = list(lens)
        self._held = np.repeat(np.array(self._lens, np.int64)[:, None], self.heads, axis=1)
        # Plain attributes: a compiled forward guards what it reads, here one number instead of a list.
        self.longest = max(self._lens, default=0)
        self.even = len(set(self._lens)) <= 1

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys and values."""
        return self.keys.nbytes + self.values.nbytes

    @property
    def metadata_nbytes(self) -> int:
        """Bytes allocated beside keys and values."""
        return self.positions.nbytes + sum(extra.nbytes for extra in self.extras.values())

    def tensors(self) -> dict[str, Tensor]:
        """Everything that is kept per entry, by name: ``[batch, kv_heads, capacity, ...]``."""
        named = {"keys": self.keys, "values": self.values, "positions": self.positions}
        return named | {f"extra.{name}": extra for name, extra in self.extras.items()}

    def _replace(self, tensors: dict[str, Tensor]) -> None:
        self.keys, self.values = tensors["keys"], tensors["values"]
        self.positions = tensors["positions"]
        self.extras = {name: tensors[f"extra.{name}"] for name in self.extras}

    def append(
        self,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        fresh: Sequence[int],
        slots: Tensor | None = None,
        extras: dict[str, Tensor] | None = None,
    ) -> None:
        """Store new tokens behind each row's entries.

        Parameters
        ----------
        keys, values
            ``[batch, kv_heads, new, dim]``.
        positions
            int64 ``[batch, new]``.
        fresh
            How many of the last columns are real, per row; the columns before are left padding.
        slots
            int64 ``[batch]`` with the rows' lengths on the device, for single tokens on uneven rows;
            made here when ``None``.
        extras
            float32 ``[batch, kv_heads, new]`` by name; those left out start at zero.
        """
        new = keys.shape[2]
        if self.even and all(count == new for count in fresh):
            start = self.lens[0]
            self.keys[:, :, start : start + new].copy_(keys)
            self.values[:, :, start : start + new].copy_(values)
            self.positions[:, :, start : start + new].copy_(positions[:, None])
        elif new == 1 and all(fresh):
            rows = torch.arange(self.batch, device=keys.device)
            if slots is None:
                slots = torch.tensor(self.lens, device=keys.device)
            self.keys[rows, :, slots] = keys[:, :, 0]
            self.values[rows, :, slots] = values[:, :, 0]
            self.positions[rows, :, slots] = positions.to(torch.int32)
        else:
            for row, (start, count) in enumerate(zip(self.lens, fresh, strict=True)):
                target = slice(start, start + count)
                self.keys[row, :, target].copy_(keys[row, :, new - count :])
                self.values[row, :, target].copy_(values[row, :, new - count :])
                self.positions[row, :, target].copy_(positions[row, new - count :])
        for name, extra in self.extras.items():
            given = (extras or {}).get(name)
            if given is None and self.even:
                extra[:, :, self.lens[0] : self.lens[0] + new] = 0.0
                continue
            for row, (start, count) in enumerate(zip(self.lens, fresh, strict=True)):
                part = extra[row, :, start : start + count]
                part.zero_() if given is None else part.copy_(given[row, :, new - count :])
        self.lens = [start + count for start, count in zip(self.lens, fresh, strict=True)]

    @torch.inference_mode(False)
    @torch.no_grad()
    def resize(self, capacity: int) -> None:
        """Reallocate to ``capacity`` slots; the entries stay."""
        kept = min(capacity, self.longest)
        resized = {}
        for name, tensor in self.tensors().items():
            fresh = tensor.new_zeros(*tensor.shape[:2], capacity, *tensor.shape[3:])
            fresh[:, :, :kept].copy_(tensor[:, :, :kept])
            resized[name] = fresh
        self._replace(resized)

    def compact(self, rows: Sequence[int], decision: KeepDecision, new_lens: Sequence[int]) -> None:
        """Move the kept entries of some rows to their first slots, in order.

        Parameters
        ----------
        rows
            Rows that the decision speaks of, in its order.
        decision
            Indices into the rows' entries; all heads of a row keep equally many.
        new_lens
            The rows' new lengths, known on the host.
        """
        width = decision.max_kept
        everyone = list(rows) == list(range(self.batch)) and len(set(new_lens)) == 1
        flat = self._flat(rows, decision.indices)
        for tensor in self.tensors().values():
            # One contiguous vector per entry: rows of a flat table, copied whole.
            table = tensor.view(-1, *tensor.shape[3:])
            moved = table.index_select(0, flat)
            moved = moved.view(len(rows), tensor.shape[1], width, *tensor.shape[3:])
            if everyone:
                tensor[:, :, :width].copy_(moved)
                continue
            for source, row in enumerate(rows):
                kept = new_lens[source]
                tensor[row, :, :kept].copy_(moved[source, :, :kept])
        lens = list(self.lens)
        for row, length in zip(rows, new_lens, strict=True):
            lens[row] = length
        self.lens = lens

    def set_values(self, rows: Sequence[int], values: Tensor) -> None:
        """Replace the values of all entries of some rows.

        Parameters
        ----------
        values
            ``[rows, kv_heads, entries, value_dim]``; what lies behind a row's length is ignored.
        """
        for source, row in enumerate(rows):
            held = self.lens[row]
            self.values[row, :, :held].copy_(values[source, :, :held])

    def write(self, rows: Sequence[int], entries: Mapping[str, Tensor], held: IntArray) -> None:
        """Replace everything that some rows hold.

        Parameters
        ----------
        rows
            Whose entries.
        entries
            ``[rows, kv_heads, entries, ...]`` by name, as :meth:`padded` names them; at most the capacity.
        held
            int ``[rows, kv_heads]``: how many of them count; all heads of a row hold equally many.
        """
        lens = [int(length) for length in held[:, 0]]
        for name, tensor in self.tensors().items():
            given = entries[name]
            for source, row in enumerate(rows):
                tensor[row, :, : lens[source]].copy_(given[source, :, : lens[source]])
        changed = list(self.lens)
        for row, length in zip(rows, lens, strict=True):
            changed[row] = length
        self.lens = changed

    def _flat(self, rows: Sequence[int], indices: Tensor) -> Tensor:
        heads = self.keys.shape[1]
        row_index = torch.tensor(list(rows), device=indices.device)
        first = (row_index[:, None] * heads + torch.arange(heads, device=indices.device)) * self.capacity
        return (first[..., None] + indices).reshape(-1)

    @torch.inference_mode(False)
    @torch.no_grad()
    def select_rows(self, index: Sequence[int]) -> None:
        """Keep the rows ``index``, in that order, repeats allowed (beams, several samples)."""
        chosen = torch.tensor(list(index), device=self.keys.device)
        self._replace({name: t.index_select(0, chosen) for name, t in self.tensors().items()})
        self.lens = [self.lens[row] for row in index]

    def forget_newest(self, removed: int) -> None:
        """Forget the newest ``removed`` entries of every row."""
        self.lens = [length - removed for length in self.lens]

    def add_extra(self, name: str, amount: Tensor) -> None:
        """Add float32 ``[batch, kv_heads, entries]`` to a number that is kept per entry."""
        self.extras[name][:, :, : amount.shape[2]] += amount

    def set_newest(self, name: str, values: Tensor) -> None:
        """Set a number kept per entry, ``[batch, kv_heads, newest]``, for the newest of every row."""
        extra, newest = self.extras[name], values.shape[2]
        if self.even:
            extra[:, :, self.lens[0] - newest : self.lens[0]].copy_(values)
            return
        for row, length in enumerate(self.lens):
            extra[row, :, length - newest : length].copy_(values[row])

    def padded(self, rows: Sequence[int] | None = None, *names: str) -> dict[str, Tensor]:
        """What is stored, every row as long as the longest of these rows; behind its entries, anything.

        Parameters
        ----------
        rows
            Which rows, ``None`` for all: then the tensors are views of the store, else copies.
        names
            Of ``keys``, ``values``, ``positions``, ``extra.NAME``; none for all of them.

        Returns
        -------
        dict
            ``[rows, kv_heads, entries, ...]`` by name.
        """
        entries = self.longest if rows is None else max(self.lens[row] for row in rows)
        tensors = self.tensors()
        chosen = {name: tensors[name][:, :, :entries] for name in (names or tensors)}
        if rows is None:
            return chosen
        index = torch.tensor(list(rows), device=self.device)
        return {name: tensor.index_select(0, index) for name, tensor in chosen.items()}

    def valid(self, entries: int, rows: Sequence[int] | None = None) -> Tensor:
        """bool ``[rows, kv_heads, entries]``: slots that hold an entry."""
        lens = self.lens if rows is None else [self.lens[row] for row in rows]
        device = self.keys.device
        stored = torch.arange(entries, device=device) < torch.tensor(lens, device=device)[:, None]
        return stored[:, None].expand(-1, self.keys.shape[1], -1)

    def check_integrity(self) -> None:
        """Verify that lengths fit and positions ascend in every row and head (reads the device).

        Raises
        ------
        CacheIntegrityError
            If they do not.
        """
        for row, length in enumerate(self.lens):
            if not 0 <= length <= self.capacity:
                raise CacheIntegrityError(f"row {row} claims {length} entries in {self.capacity} slots.")
            stored = self.positions[row, :, :length]
            if bool((stored[:, 1:] <= stored[:, :-1]).any()):
                raise CacheIntegrityError(f"the positions of row {row} do not ascend.")
