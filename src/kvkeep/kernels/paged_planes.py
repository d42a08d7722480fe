"""What a copy of entries looks like to a kernel that knows no types: addresses, words and strides.

A *plane* is one tensor of a pool in a launch, seven int64: address of the target, address of the source,
words of an entry, how many of them to read (the others become zero: all of a tensor that is not given), and
the source's strides in words over rows, heads and columns.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from kvkeep.core.arrays import IntArray

PLANE = 7  # numbers of a plane
_LARGEST_WORD = 4  # positions are that long


def entry_bytes(pooled: Tensor) -> int:
    """Bytes of one entry of ``[slots, ...]``."""
    return math.prod(pooled.shape[1:]) * pooled.element_size()


def readable(source: Tensor, target: Tensor) -> Tensor:
    """``[rows, heads, new, ...]`` with each entry in one piece that begins with the target's bits.

    No copy for the views that models hand over. An int64 is left as it is for an int32: on the
    little-endian machines that CUDA runs on its lower half comes first.

    Raises
    ------
    TypeError
        If the types differ otherwise, as the torch version does.
    """
    if source.dtype != target.dtype and (source.dtype, target.dtype) != (torch.int64, torch.int32):
        raise TypeError(f"a pool of {target.dtype} was given entries of {source.dtype}; convert them before")
    in_one_piece = source.dim() == 3 or source.shape[-1] == 1 or source.stride(-1) == 1
    return source if in_one_piece else source.contiguous()


def copying(pool: Mapping[str, Tensor], copies: Mapping[str, Tensor]) -> tuple[IntArray, int]:
    """Planes from the slots of a pool to contiguous copies, int64 ``[planes, 7]``, and bytes of a word."""
    word = math.gcd(_LARGEST_WORD, *map(entry_bytes, pool.values()))
    rows = [
        _plane(copies[name], tensor, entry_bytes(tensor), (0, 0, 0), word) for name, tensor in pool.items()
    ]
    return np.array(rows, np.int64), word


def appending(pool: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> tuple[IntArray, int]:
    """Planes from :func:`readable` tensors to a pool's slots, int64 ``[planes, 7]``, and bytes of a word."""
    strides = {
        name: [step * each.element_size() for step in each.stride()[:3]] for name, each in given.items()
    }
    begins = [each.data_ptr() for each in given.values()]
    word = math.gcd(
        _LARGEST_WORD, *map(entry_bytes, pool.values()), *begins, *itertools.chain(*strides.values())
    )
    rows = [
        _plane(tensor, given.get(name), entry_bytes(tensor), strides.get(name, (0, 0, 0)), word)
        for name, tensor in pool.items()
    ]
    return np.array(rows, np.int64), word


def _plane(target: Tensor, source: Tensor | None, size: int, strides: Sequence[int], word: int) -> list[int]:
    words = size // word
    read = (0, words, 0) if source is None else (source.data_ptr(), words, words)
    return [target.data_ptr(), *read, *(step // word for step in strides)]


def upload_together(
    planes: IntArray, arrays: Sequence[IntArray], device: torch.device
) -> tuple[Tensor, list[Tensor]]:
    """Planes, and arrays as flat int32, on the device after one transfer (see ``paged_move.upload``)."""
    flat = [np.ascontiguousarray(planes).view(np.int32).reshape(-1)]
    flat += [np.ascontiguousarray(each, np.int32).reshape(-1) for each in arrays]
    whole = torch.from_numpy(np.concatenate(flat)).to(device, non_blocking=True)
    first, *rest = whole.split([len(each) for each in flat])
    return first.view(torch.int64), rest
