"""One new query per head over pages of keys and values: the attention of a decode step on a ragged cache.

    sequence s   pages table[s, 0], table[s, 1] ...   of which the first lens[s] slots hold entries

A "sequence" here is one KV head of one row, with the query heads of its group; each has its own length.
Cost follows the entries that are stored, not the longest head.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from kvkeep.core.arrays import IntArray
from kvkeep.kernels import paged_attention_gpu

_log = logging.getLogger("kvkeep")
_NUMBA_DTYPES = (torch.float32, torch.float64)


def paged_attention(
    query: Tensor, keys: Tensor, values: Tensor, table: IntArray, lens: IntArray, scale: float
) -> Tensor:
    """Attend to the stored entries of every sequence.

    Parameters
    ----------
    query
        ``[sequences, group, head_dim]``.
    keys, values
        The pool: ``[pages, page_size, head_dim]`` and ``[pages, page_size, value_dim]``.
    table
        int32 ``[sequences, width]`` on the host: the pages of each sequence, in order.
    lens
        int32 ``[sequences]`` on the host: entries stored.
    scale
        Factor on the logits.

    Returns
    -------
    Tensor
        ``[sequences, group, value_dim]``; zeros where a sequence holds nothing.
    """
    one_type = query.dtype == keys.dtype == values.dtype  # not so under autocast
    if query.device.type == "cpu" and one_type and query.dtype in _NUMBA_DTYPES:
        compiled = compiled_kernel()
        if compiled is not None:
            return compiled(query, keys, values, table, lens, scale)
    if query.is_cuda and one_type and lens.all() and paged_attention_gpu.can_attend(query, values):
        return paged_attention_gpu.attend(query, keys, values, table, lens, scale)
    return paged_attention_torch(query, keys, values, table, lens, scale)


def paged_attention_torch(
    query: Tensor, keys: Tensor, values: Tensor, table: IntArray, lens: IntArray, scale: float
) -> Tensor:
    """The plain twin of :func:`paged_attention`, on any device: one product per page, softmax by segment."""
    sequences, group, _ = query.shape
    size, device = keys.shape[1], query.device
    counts = -(-lens // size)
    owner = np.repeat(np.arange(sequences), counts)
    nth = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    pages = torch.from_numpy(table[owner, nth].astype(np.int64)).to(device)
    filled = torch.from_numpy(np.minimum(lens[owner] - nth * size, size)).to(device)
    segment = torch.from_numpy(owner).to(device)
    work = torch.promote_types(query.dtype, torch.float32)
    output = torch.zeros(sequences, group, values.shape[-1], dtype=work, device=device)
    if len(owner) == 0:
        return output.to(query.dtype)
    empty = torch.arange(size, device=device) >= filled[:, None]
    logits = (query[segment].to(work) @ keys[pages].to(work).transpose(1, 2)) * scale  # [pages, group, slots]
    logits.masked_fill_(empty[:, None], float("-inf"))
    of_page = segment[:, None].expand(-1, group)
    peak = logits.new_full((sequences, group), float("-inf"))
    peak = peak.scatter_reduce(0, of_page, logits.amax(-1), "amax")
    shares = (logits - peak[segment][..., None]).exp_()
    total = torch.zeros_like(peak).index_add_(0, segment, shares.sum(-1))
    # What lies behind the entries of a page is anything, also NaN, which a share of zero does not hide.
    mixed = shares @ values[pages].to(work).masked_fill_(empty[..., None], 0.0)
    output.index_add_(0, segment, mixed)
    return (output / total.clamp(min=torch.finfo(work).tiny)[..., None]).to(query.dtype)


@functools.cache
def compiled_kernel() -> Callable[..., Tensor] | None:
    """The version that numba compiles, or ``None`` after one warning, where numba is missing or broken."""
    try:
        from kvkeep.kernels.paged_attention_cpu import attend
    except ImportError as error:  # also what a numba that refuses the installed numpy raises
        _log.warning(
            "kvkeep: numba cannot be used (%s), so a ragged cache attends with plain torch, several times "
            "slower on a CPU: pip install 'kvkeep[paged]'",
            error,
        )
        return None
    return attend
