"""What the engine asks of a store, whichever way it lays entries out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from kvkeep.core.arrays import IntArray


class Memory(Protocol):
    """What holds the tensors of one or more stores."""

    def tensors(self) -> dict[str, Tensor]:
        """Everything that is kept per entry, by name."""

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys and values."""

    @property
    def metadata_nbytes(self) -> int:
        """Bytes allocated beside keys and values."""


class Store(Protocol):
    """Entries of one layer.

    A :class:`~kvkeep.cache.DenseStore`, a :class:`~kvkeep.cache.PagedStore`, or two of a kind in a
    :class:`~kvkeep.cache.quantized.MixedStore`.
    """

    @property
    def batch(self) -> int:
        """Rows."""

    @property
    def heads(self) -> int:
        """KV heads."""

    @property
    def held(self) -> IntArray:
        """Entries, ``[batch, kv_heads]``."""

    @property
    def longest(self) -> int:
        """Most entries of any head."""

    @property
    def memories(self) -> Sequence[Memory]:
        """What holds the tensors; stores may share it."""

    @property
    def device(self) -> torch.device:
        """Where the entries are."""

    @property
    def extras(self) -> Any:
        """Names of what is kept beside keys, values and positions."""

    def padded(self, rows: Sequence[int] | None = None, *names: str) -> dict[str, Tensor]:
        """What is stored, every head as long as the longest: ``[rows, kv_heads, entries, ...]`` by name."""

    def valid(self, entries: int, rows: Sequence[int] | None = None) -> Tensor:
        """bool ``[rows, kv_heads, entries]``: slots that hold an entry."""

    def add_extra(self, name: str, amount: Tensor) -> None:
        """Add float32 ``[batch, kv_heads, entries]`` to a number that is kept per entry."""

    def set_newest(self, name: str, values: Tensor) -> None:
        """Set a number kept per entry, ``[batch, kv_heads, newest]``, for the newest of every head."""

    def set_values(self, rows: Sequence[int], values: Tensor) -> None:
        """Replace the values of all entries of some rows: ``[rows, kv_heads, entries, value_dim]``."""

    def forget_newest(self, removed: int) -> None:
        """Forget the newest ``removed`` entries of every head."""

    def select_rows(self, index: Sequence[int]) -> None:
        """Keep the rows ``index``, in that order, repeats allowed."""

    def check_integrity(self) -> None:
        """Verify the bookkeeping (reads the device).

        Raises
        ------
        CacheIntegrityError
            If it does not add up.
        """


def allocated(stores: Sequence[Store]) -> tuple[int, int]:
    """Bytes of keys and values, and bytes beside them, counting shared memory once."""
    memories = {id(each): each for store in stores for each in store.memories}.values()
    return sum(each.nbytes for each in memories), sum(each.metadata_nbytes for each in memories)
