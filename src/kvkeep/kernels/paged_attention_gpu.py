"""The GPU version of paged attention: flashinfer, with every KV head of every row as a sequence of its own.

flashinfer reads the pool in place. Its plan is made of the host tables (pages one after the other, where each
sequence begins, how full its last page is), so a step asks the device for nothing. Names and meanings were
read in flashinfer 0.7.4.
"""

from __future__ import annotations

import functools
import logging
import threading
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvkeep.core.arrays import IntArray
from kvkeep.kernels.plan_ring import PlanRing

_log = logging.getLogger("kvkeep")
_WORKSPACE_BYTES = 128 * 2**20
_HEAD_DIMS = (64, 128, 256)
_DTYPES = (torch.float16, torch.bfloat16)
_PLANS = 4  # layers that the host may be ahead of the device; each plan has 8 MiB on either
_one_at_a_time = threading.Lock()


def can_attend(query: Tensor, values: Tensor) -> bool:
    """Whether flashinfer is installed and serves these shapes and types."""
    dim = query.shape[-1]
    fits = query.dtype in _DTYPES and dim in _HEAD_DIMS and values.shape[-1] == dim
    return fits and query.is_cuda and _flashinfer() is not None


def attend(
    query: Tensor, keys: Tensor, values: Tensor, table: IntArray, lens: IntArray, scale: float
) -> Tensor:
    """See :func:`kvkeep.kernels.paged_attention.paged_attention`; every sequence holds an entry."""
    group, dim = query.shape[1:]
    size = keys.shape[1]
    begins, pages, last = csr(table, lens, size)
    # A wrapper's plan is its own until it has been run, and events are of the current device.
    with _one_at_a_time, torch.cuda.device(query.device):
        ring = _ring(query.device, torch.cuda.current_stream(query.device).cuda_stream)
        with ring.turn() as wrapper:
            wrapper.plan(
                begins,
                pages,
                last,
                num_qo_heads=group,
                num_kv_heads=1,
                head_dim=dim,
                page_size=size,
                sm_scale=float(scale),
                q_data_type=query.dtype,
                kv_data_type=keys.dtype,
            )
        # One KV head per page: [pages, page_size, 1, dim].
        pool = (keys.unsqueeze(2), values.unsqueeze(2))
        return wrapper.run(query.contiguous(), pool)  # type: ignore[no-any-return]


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
def _flashinfer() -> ModuleType | None:
    """The package, or ``None``; after one warning where it is installed and does not import."""
    try:
        import flashinfer
    except ModuleNotFoundError as error:
        if error.name != "flashinfer":
            _log.warning(
                "kvkeep: flashinfer cannot be used (%s): pages are attended to by plain torch.", error
            )
        return None
    except Exception as error:  # it loads CUDA libraries on import
        _log.warning("kvkeep: flashinfer cannot be used (%s): pages are attended to by plain torch.", error)
        return None
    return flashinfer  # type: ignore[no-any-return]


@functools.cache
def _ring(device: torch.device, stream: int) -> PlanRing[Any]:
    """Wrappers of one stream. They share the workspace: on a stream one kernel writes after the other."""
    flashinfer = _flashinfer()
    assert flashinfer is not None
    workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    def wrapper() -> Any:
        # Tensor cores serve groups of any size, the other kernels only some. For 16-bit types they mean fa2;
        # "auto" would leave it for cuDNN at some head counts of some devices.
        return flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=True, backend="fa2"
        )

    return PlanRing([(wrapper(), torch.cuda.Event()) for _ in range(_PLANS)])
