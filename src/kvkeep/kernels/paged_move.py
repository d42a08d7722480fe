"""Entries into pages, out of pages, and from place to place within a head's pages.

    pool        by name, one long row of slots [slots, ...]: keys, values, positions, further numbers
    table       int32 [rows, heads, width] on the host: the pages of each head, in order
    place j     of a head is slot table[j // page_size] * page_size + j % page_size

Each function has a version of plain torch operations, one or two per tensor, for any device. On CUDA, where
triton is installed, one launch does all tensors (:mod:`kvkeep.kernels.paged_move_triton`). Both copy bits.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Iterable, Mapping
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from kvkeep.core.arrays import BoolArray, IntArray

_log = logging.getLogger("kvkeep")


def append(
    pool: Mapping[str, Tensor], given: Mapping[str, Tensor], slots: IntArray, columns: IntArray | None
) -> None:
    """Write new entries to slots; what is not given becomes zero there.

    Parameters
    ----------
    pool
        ``[slots, ...]`` by name.
    given
        ``[rows, heads, new, ...]`` by name, of the pool's types; int64 is taken for int32, too.
    slots
        Where the entries go: int ``[entries]`` on the host, no two alike.
    columns
        Which of the ``rows * heads * new`` given entries they are, ``None`` for all, in order.
    """
    fast = _fast(pool, given.values())
    (fast.append if fast else append_torch)(pool, given, slots, columns)


def gather(
    pool: Mapping[str, Tensor], table: IntArray, held: IntArray, entries: int, page_size: int
) -> dict[str, Tensor]:
    """Copy what heads hold, ``[rows, heads, entries, ...]`` by name, zeros behind.

    Parameters
    ----------
    pool
        ``[slots, ...]`` by name; the slots of page 0 are zero.
    table
        int32 ``[rows, heads, width]`` on the host.
    held
        int ``[rows, heads]`` on the host: entries of each head, at most ``entries``.
    entries, page_size
        Length of the copy; slots of a page.
    """
    fast = _fast(pool)
    return (fast.gather if fast else gather_torch)(pool, table, held, entries, page_size)


def move(
    pool: Mapping[str, Tensor], table: IntArray, indices: Tensor, lengths: IntArray, page_size: int
) -> None:
    """Move the kept entries of every head to its first places, in order.

    Parameters
    ----------
    pool
        ``[slots, ...]`` by name.
    table
        int32 ``[rows, heads, width]`` on the host; no page is named by two heads.
    indices
        int64 ``[rows, heads, kept]``: places of the kept entries, ascending; what lies behind a head's
        length is ignored.
    lengths
        int ``[rows, heads]`` on the host: how many entries each head keeps.
    page_size
        Slots of a page.
    """
    fast = _fast(pool)
    (fast.move if fast else move_torch)(pool, table, indices, lengths, page_size)


def append_torch(
    pool: Mapping[str, Tensor], given: Mapping[str, Tensor], slots: IntArray, columns: IntArray | None
) -> None:
    """The plain twin of :func:`append`."""
    device = next(iter(pool.values())).device
    target, source = upload(slots, device), None if columns is None else upload(columns, device)
    for name, tensor in pool.items():
        if name in given:
            entries = given[name].reshape(-1, *tensor.shape[1:])
            entries = entries.to(torch.int32) if entries.dtype == torch.int64 else entries
            tensor.index_copy_(0, target, entries if source is None else entries[source])
        else:
            tensor.index_fill_(0, target, 0.0)


def gather_torch(
    pool: Mapping[str, Tensor], table: IntArray, held: IntArray, entries: int, page_size: int
) -> dict[str, Tensor]:
    """The plain twin of :func:`gather`."""
    _, slots = places(table, held, entries, page_size)
    index = upload(slots.reshape(-1), next(iter(pool.values())).device)
    return {
        name: tensor.index_select(0, index).view(*slots.shape, *tensor.shape[1:])
        for name, tensor in pool.items()
    }


def move_torch(
    pool: Mapping[str, Tensor], table: IntArray, indices: Tensor, lengths: IntArray, page_size: int
) -> None:
    """The plain twin of :func:`move`; reads ``indices`` from the device."""
    entries = indices.shape[2]
    row, head, place = np.nonzero(np.arange(entries) < lengths[..., None])
    kept = indices.cpu().numpy()[row, head, place]
    source = table[row, head, kept // page_size].astype(np.int64) * page_size + kept % page_size
    target = table[row, head, place // page_size].astype(np.int64) * page_size + place % page_size
    moves = source != target  # most policies keep the oldest entries where they are
    device = next(iter(pool.values())).device
    source_index, target_index = upload(source[moves], device), upload(target[moves], device)
    for tensor in pool.values():
        tensor.index_copy_(0, target_index, tensor.index_select(0, source_index))


def places(table: IntArray, held: IntArray, entries: int, page_size: int) -> tuple[BoolArray, IntArray]:
    """Where heads hold an entry, bool ``[rows, heads, entries]``, and its slot, int64 (0 elsewhere)."""
    nth = np.arange(entries)
    where = nth < held[..., None]
    width = table.shape[2]
    if width == 0:
        return where, np.zeros(where.shape, np.int64)
    pages = table[..., np.minimum(nth // page_size, width - 1)].astype(np.int64)
    return where, np.where(where, pages * page_size + nth % page_size, 0)


def upload(array: IntArray, device: torch.device) -> Tensor:
    """The same numbers as int64 on a device, without waiting for what the device still has to do.

    The memory is not pinned, so the driver has read it before the call returns: the array may go.
    """
    return torch.from_numpy(np.ascontiguousarray(array, np.int64)).to(device, non_blocking=True)


def _fast(pool: Mapping[str, Tensor], given: Iterable[Tensor] = ()) -> ModuleType | None:
    """The Triton version, where it serves these tensors."""
    tensors = [*pool.values(), *given]
    if not all(tensor.is_cuda for tensor in tensors):
        return None
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return None  # autograd sees torch operations only
    return triton_version(tensors[0].device)


@functools.cache
def triton_version(device: torch.device) -> ModuleType | None:
    """The module of Triton kernels once they have worked on this device, else ``None``.

    Triton needs a C compiler when it first runs: what goes wrong there must not stop a generation.
    """
    if torch.version.hip is not None:
        return None  # what a barrier orders was looked up for NVIDIA only
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        return None  # the interpreter would follow pointers of the device on the host
    try:
        module = importlib.import_module("kvkeep.kernels.paged_move_triton")
        module.try_out(device)
    except Exception as error:  # missing, too old, no compiler, no driver: all mean plain torch
        _log.warning("kvkeep: Triton cannot be used (%s), so pages are moved by plain torch.", error)
        return None
    return module
