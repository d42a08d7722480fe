"""A pool of pages that many layers draw from: what one head gives back, another can use.

    page 0          always empty, all zeros: what padding reads
    page 1 ...      owned by one head of one row of one layer, or free

A page holds ``page_size`` entries: keys, values, positions, and further numbers per entry. Who owns which
page is written in the tables of the stores (:class:`~kvkeep.cache.paged.PagedStore`), on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kvkeep.core.arrays import IntArray
from kvkeep.core.errors import CacheIntegrityError

if TYPE_CHECKING:
    from kvkeep.cache.paged import PagedStore


class PagePool:
    """Pages of one shape on one device, and the list of free ones.

    Parameters
    ----------
    like_keys, like_values
        Any keys ``[..., head_dim]`` and values ``[..., value_dim]``: width, dtype and device.
    page_size
        Entries per page.
    extras
        Names of further float32 numbers to keep per entry.
    """

    @torch.inference_mode(False)  # see DenseStore
    def __init__(
        self, like_keys: Tensor, like_values: Tensor, page_size: int, extras: Sequence[str] = ()
    ) -> None:
        self.page_size = page_size
        self.keys = like_keys.new_zeros(1, page_size, like_keys.shape[-1])
        self.values = like_values.new_zeros(1, page_size, like_values.shape[-1])
        self.positions = torch.zeros(1, page_size, dtype=torch.int32, device=like_keys.device)
        self.extras = {name: torch.zeros(1, page_size, device=like_keys.device) for name in extras}
        self.stores: list[PagedStore] = []
        self._free = np.zeros(0, np.int32)

    @property
    def capacity(self) -> int:
        """Pages laid out, the empty one not counted."""
        return int(self.keys.shape[0]) - 1

    @property
    def free(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Pages that a store owns."""
        return self.capacity - self.free

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys and values."""
        return self.keys.nbytes + self.values.nbytes

    @property
    def metadata_nbytes(self) -> int:
        """Bytes allocated beside keys and values, tables included."""
        tensors = (self.positions, *self.extras.values())
        return sum(tensor.nbytes for tensor in tensors) + sum(store.table.nbytes for store in self.stores)

    def tensors(self) -> dict[str, Tensor]:
        """Everything that is kept per entry, by name: ``[pages, page_size, ...]``."""
        named = {"keys": self.keys, "values": self.values, "positions": self.positions}
        return named | {f"extra.{name}": extra for name, extra in self.extras.items()}

    def slots(self) -> dict[str, Tensor]:
        """The same as one long row of slots: ``[pages * page_size, ...]``."""
        return {name: tensor.view(-1, *tensor.shape[2:]) for name, tensor in self.tensors().items()}

    def take(self, count: int) -> IntArray:
        """Hand out ``count`` pages, lowest first; their content is whatever it was."""
        if count > self.free:
            # A quarter more than needed, so that a cache that grows token by token moves rarely.
            self.grow(self.used + count + (self.used + count) // 4)
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def give_back(self, pages: IntArray) -> None:
        """Take pages back."""
        if len(pages):
            self._free = np.sort(np.concatenate([self._free, pages.astype(np.int32)]))

    def grow(self, capacity: int) -> None:
        """Lay out at least ``capacity`` pages; pages stay where they are."""
        old = self.capacity
        if capacity <= old:
            return
        self._replace(capacity, slice(0, old + 1))
        self._free = np.concatenate([self._free, np.arange(old + 1, capacity + 1, dtype=np.int32)])

    def shrink(self, capacity: int) -> None:
        """Move the used pages together and lay out ``capacity`` pages, or as many as are used.

        Pages come to lie in the order in which attention reads them: layer, row, head.
        """
        if capacity >= self.capacity:
            return
        owned = [store.owned() for store in self.stores]
        order = np.concatenate([np.zeros(1, np.int32), *(pages for _, pages in owned)])
        capacity = max(capacity, len(order) - 1)
        self._replace(capacity, torch.from_numpy(order.astype(np.int64)).to(self.keys.device))
        begin = 1
        for store, (where, pages) in zip(self.stores, owned, strict=True):
            store.table[where] = np.arange(begin, begin + len(pages), dtype=np.int32)
            begin += len(pages)
        self._free = np.arange(begin, capacity + 1, dtype=np.int32)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _replace(self, capacity: int, source: slice | Tensor) -> None:
        """Lay new tensors out, the chosen old pages first; one after the other, to keep the peak low."""

        def moved(tensor: Tensor) -> Tensor:
            kept = source.stop if isinstance(source, slice) else len(source)
            fresh = tensor.new_empty(capacity + 1, *tensor.shape[1:])
            if isinstance(source, slice):
                fresh[:kept].copy_(tensor[source])
            else:
                torch.index_select(tensor, 0, source, out=fresh[:kept])
            return fresh

        self.keys = moved(self.keys)
        self.values = moved(self.values)
        self.positions = moved(self.positions)
        for name in self.extras:
            self.extras[name] = moved(self.extras[name])

    def check_integrity(self) -> None:
        """Verify that every page is owned once or free once, and that each store is sound.

        Raises
        ------
        CacheIntegrityError
            If not; says which.
        """
        owned = [pages for store in self.stores for pages in (store.owned()[1],)]
        everyone = np.sort(np.concatenate([self._free, *owned]).astype(np.int64))
        expected = np.arange(1, self.capacity + 1)
        if not np.array_equal(everyone, expected):
            raise CacheIntegrityError(
                f"{self.free} free and {sum(map(len, owned))} used pages are not the pages 1 to "
                f"{self.capacity}, each once."
            )
        if bool(self.keys[0].any()) or bool(self.values[0].any()):
            raise CacheIntegrityError("page 0, which padding reads, is no longer empty.")
        for store in self.stores:
            store.check_positions()
