"""The GPU version of paged attention: flashinfer, with every KV head of every row as a sequence of its own.

flashinfer reads the pool in place. Its plan is made of the host tables (pages one after the other, where each
sequence begins, how full its last page is), so a step asks the device for nothing.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvkeep.core.arrays import IntArray

_WORKSPACE_BYTES = 128 * 2**20
_HEAD_DIMS = (64, 128, 256)
_DTYPES = (torch.float16, torch.bfloat16)


def can_attend(query: Tensor, values: Tensor) -> bool:
    """Whether flashinfer is installed and serves these shapes and types."""
    dim = query.shape[-1]
    fits = query.dtype in _DTYPES and dim in _HEAD_DIMS and values.shape[-1] == dim
    return fits and query.is_cuda and importlib.util.find_spec("flashinfer") is not None


def attend(
    query: Tensor, keys: Tensor, values: Tensor, table: IntArray, lens: IntArray, scale: float
) -> Tensor:
    """See :func:`kvkeep.kernels.paged_attention.paged_attention`; every sequence holds an entry."""
    group, dim = query.shape[1:]
    size = keys.shape[1]
    wrapper = _wrapper(query.device)
    begins, pages, last = csr(table, lens, size)
    wrapper.plan(
        begins,
        pages,
        last,
        num_qo_heads=group,
        num_kv_heads=1,
        head_dim=dim,
        page_size=size,
        sm_scale=scale,
        q_data_type=query.dtype,
        kv_data_type=keys.dtype,
    )
    # One KV head per page: [pages, page_size, 1, dim].
    return wrapper.run(query.contiguous(), (keys.unsqueeze(2), values.unsqueeze(2)))  # type: ignore[no-any-return]


def csr(table: IntArray, lens: IntArray, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """A padded table as flashinfer wants it.

    Returns
    -------
    tuple
        int32 on the host: where each sequence's pages begin ``[sequences + 1]``, all pages in a row, and
        entries on each last page ``[sequences]``.
    """
    counts = -(-lens // size)
    begins = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    pages = table[np.arange(table.shape[1]) < counts[:, None]]
    last = lens - (counts - 1) * size
    return tuple(torch.from_numpy(each.astype(np.int32)) for each in (begins, pages, last))  # type: ignore[return-value]


@functools.cache
def _wrapper(device: torch.device) -> Any:
    import flashinfer

    workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    # Tensor cores serve groups of any size; the other kernels only some.
    return flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
