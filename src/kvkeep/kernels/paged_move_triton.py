"""The CUDA version of :mod:`kvkeep.kernels.paged_move`: one upload and one launch for all tensors of a pool.

An entry is so many words of memory: the kernels copy words and know no types, so what they write has the
bits of what they read. What differs between keys, values and positions is written in a *plane*
(:mod:`kvkeep.kernels.paged_planes`). Planes, tables and lengths travel to the device in one piece.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from kvkeep.core.arrays import IntArray
from kvkeep.kernels.paged_planes import PLANE, appending, copying, readable, upload_together

_PLANE = tl.constexpr(PLANE)
_WORDS = {4: tl.int32, 2: tl.int16, 1: tl.int8}
# Not tuned: no GPU was at hand. A tile of 16 x 128 words is 16 registers a thread at four warps.
_COPIED, _MOVED, _WIDEST = 8, 16, 128  # entries that a program takes at once, and words of each

# Lengths change with every step, and with them where a table begins in the upload: neither must make Triton
# compile anew, as it does for numbers and addresses that sixteen divides.
_FREE_OF_APPEND = ["slots", "columns", "total", "heads", "new"]
_FREE_OF_GATHER = ["table", "held", "width", "entries", "page_size"]
_FREE_OF_MOVE = ["table", "lengths", "indices", "width", "entries", "page_size"]


@triton.jit(do_not_specialize=_FREE_OF_APPEND)
def append_kernel(  # type: ignore[no-untyped-def]
    planes, slots, columns, total, heads, new, WORD: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """A program writes ``ROWS`` entries of one plane."""
    plane = planes + tl.program_id(1) * _PLANE
    target = tl.load(plane).to(tl.pointer_type(WORD))
    source = tl.load(plane + 1).to(tl.pointer_type(WORD))
    words = tl.load(plane + 2)
    given = tl.load(plane + 3)
    entry = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = entry < total
    slot = tl.load(slots + entry, mask=live, other=0).to(tl.int64)
    column = tl.load(columns + entry, mask=live, other=0)
    begin = (column // new // heads) * tl.load(plane + 4)
    begin += (column // new % heads) * tl.load(plane + 5)
    begin += (column % new) * tl.load(plane + 6)
    for first in range(0, words, COLS):
        word = first + tl.arange(0, COLS)
        read = live[:, None] & (word < given)[None, :]
        taken = tl.load(source + begin[:, None] + word[None, :], mask=read, other=0)
        written = live[:, None] & (word < words)[None, :]
        tl.store(target + (slot * words)[:, None] + word[None, :], taken, mask=written)


@triton.jit(do_not_specialize=_FREE_OF_GATHER)
def gather_kernel(  # type: ignore[no-untyped-def]
    planes, table, held, width, entries, page_size, WORD: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """A program copies ``ROWS`` places of one head and plane; zeros where the head holds nothing."""
    plane = planes + tl.program_id(1) * _PLANE
    target = tl.load(plane).to(tl.pointer_type(WORD))
    source = tl.load(plane + 1).to(tl.pointer_type(WORD))
    words = tl.load(plane + 2)
    blocks = (entries + ROWS - 1) // ROWS
    head = tl.program_id(0) // blocks
    place = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    inside = place < entries
    stored = place < tl.load(held + head)
    page = tl.load(table + head.to(tl.int64) * width + place // page_size, mask=stored, other=0)
    slot = page.to(tl.int64) * page_size + place % page_size
    copied = head.to(tl.int64) * entries + place
    for first in range(0, words, COLS):
        word = first + tl.arange(0, COLS)
        wanted = (word < words)[None, :]
        taken = tl.load(
            source + (slot * words)[:, None] + word[None, :], mask=stored[:, None] & wanted, other=0
        )
        tl.store(target + (copied * words)[:, None] + word[None, :], taken, mask=inside[:, None] & wanted)


@triton.jit(do_not_specialize=_FREE_OF_MOVE)
def move_kernel(  # type: ignore[no-untyped-def]
    planes,
    table,
    lengths,
    indices,
    width,
    entries,
    page_size,
    WORD: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """A program moves the kept entries of one head and plane, ``ROWS`` at a time, without a second copy.

    Why nothing is overwritten before it was read:

    - Heads share no page and planes no memory, so programs never meet.
    - Kept places ascend, so the ``j``-th is at least ``j``: sources of a later block (``j >= end``) lie at
      or behind ``end``, and targets of this block before it. A block never writes what a later one reads,
      no matter how far ahead a warp or the compiler reads.
    - Within a block a source may be another's target. The barrier puts every load of the block before
      every store: CUDA's ``bar.sync`` completes the accesses before it for all threads of the program.
    """
    plane = planes + tl.program_id(1) * _PLANE
    pool = tl.load(plane).to(tl.pointer_type(WORD))
    words = tl.load(plane + 2)
    head = tl.program_id(0).to(tl.int64)
    kept = tl.load(lengths + head)
    for first in range(0, words, COLS):
        word = first + tl.arange(0, COLS)
        wanted = (word < words)[None, :]
        for begin in range(0, kept, ROWS):
            place = begin + tl.arange(0, ROWS)
            live = place < kept
            origin = tl.load(indices + head * entries + place, mask=live, other=0).to(tl.int32)
            moves = live & (origin != place)  # most policies keep the oldest entries where they are
            page = tl.load(table + head * width + origin // page_size, mask=moves, other=0)
            source = (page.to(tl.int64) * page_size + origin % page_size) * words
            page = tl.load(table + head * width + place // page_size, mask=moves, other=0)
            target = (page.to(tl.int64) * page_size + place % page_size) * words
            both = moves[:, None] & wanted
            taken = tl.load(pool + source[:, None] + word[None, :], mask=both, other=0)
            tl.debug_barrier()
            tl.store(pool + target[:, None] + word[None, :], taken, mask=both)


def append(
    pool: Mapping[str, Tensor], given: Mapping[str, Tensor], slots: IntArray, columns: IntArray | None
) -> None:
    """See :func:`kvkeep.kernels.paged_move.append`; sources are read with the strides that they have."""
    if len(slots) == 0:
        return
    rows, heads, new = next(iter(given.values())).shape[:3]
    sources = {name: readable(given[name], target) for name, target in pool.items() if name in given}
    planes, word = appending(pool, sources)
    every = np.arange(rows * heads * new) if columns is None else columns
    with _on(pool) as device:
        described, (slot, column) = upload_together(planes, (slots, every), device)
        append_kernel[-(-len(slots) // _COPIED), len(planes)](
            described, slot, column, len(slots), heads, new, **_shape(planes, word, _COPIED)
        )


def gather(
    pool: Mapping[str, Tensor], table: IntArray, held: IntArray, entries: int, page_size: int
) -> dict[str, Tensor]:
    """See :func:`kvkeep.kernels.paged_move.gather`."""
    shape = (*held.shape, entries)
    copies = {name: tensor.new_empty(*shape, *tensor.shape[1:]) for name, tensor in pool.items()}
    if math.prod(shape) == 0:
        return copies
    planes, word = copying(pool, copies)
    with _on(pool) as device:
        described, (pages, lengths) = upload_together(planes, (table, held), device)
        gather_kernel[held.size * -(-entries // _COPIED), len(planes)](
            described, pages, lengths, table.shape[2], entries, page_size, **_shape(planes, word, _COPIED)
        )
    return copies


def move(
    pool: Mapping[str, Tensor], table: IntArray, indices: Tensor, lengths: IntArray, page_size: int
) -> None:
    """See :func:`kvkeep.kernels.paged_move.move`; ``indices`` stay on the device."""
    if not lengths.any():
        return
    planes, word = copying(pool, pool)
    with _on(pool) as device:
        described, (pages, kept) = upload_together(planes, (table, lengths), device)
        width, entries = table.shape[2], indices.shape[2]
        move_kernel[lengths.size, len(planes)](
            described, pages, kept, indices.contiguous(), width, entries, page_size,
            **_shape(planes, word, _MOVED),
        )  # fmt: skip


def try_out(device: torch.device) -> None:
    """Append, move and gather two entries.

    Raises
    ------
    Exception
        Whatever keeps Triton from working here; ``RuntimeError`` where it worked and got it wrong.
    """
    pool = {
        "keys": torch.zeros(4, 3, device=device),
        "positions": torch.zeros(4, dtype=torch.int32, device=device),
    }
    keys = torch.tensor([[[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]]], device=device)
    table, two = np.array([[[1]]], np.int32), np.array([[2]])
    append(pool, {"keys": keys, "positions": torch.tensor([[[7, 9]]], device=device)}, np.array([2, 3]), None)
    move(pool, table, torch.tensor([[[1]]], device=device), two - 1, 2)
    found = gather(pool, table, two, 2, 2)
    if not torch.equal(found["keys"], keys[:, :, [1, 1]]) or found["positions"].tolist() != [[[9, 9]]]:
        raise RuntimeError("its kernels wrote something else than was asked for")


def _shape(planes: IntArray, word: int, rows: int) -> dict[str, Any]:
    """What kernels are compiled for."""
    widest = triton.next_power_of_2(int(planes[:, 2].max()))
    return {"WORD": _WORDS[word], "ROWS": rows, "COLS": min(widest, _WIDEST)}


@contextlib.contextmanager
def _on(pool: Mapping[str, Tensor]) -> Iterator[torch.device]:
    """The pool's device, current while a kernel is launched."""
    device = next(iter(pool.values())).device
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        yield device
