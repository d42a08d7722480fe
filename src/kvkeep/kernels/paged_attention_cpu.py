"""The CPU version of paged attention, compiled by numba: reads pages where they lie.

Pages are shared out to threads by entries, not by heads, so that one long head does not leave the other
threads waiting. Each thread keeps a running softmax (maximum, sum, weighted values) for every sequence
that it touches; where a sequence was cut between threads the parts are merged.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from kvkeep.core.arrays import IntArray

# Reordering sums is what lets loops use vector units; infinities must keep their meaning.
_FASTMATH = {"reassoc", "contract", "nsz", "arcp"}
# Numba's simplest threading layer aborts the process when two Python threads use it at once.
_one_at_a_time = threading.Lock()


def attend(
    query: Tensor, keys: Tensor, values: Tensor, table: IntArray, lens: IntArray, scale: float
) -> Tensor:
    """See :func:`kvkeep.kernels.paged_attention.paged_attention`."""
    output = torch.empty(*query.shape[:2], values.shape[-1], dtype=query.dtype)
    threads = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]
    arrays = (query.contiguous().detach().numpy(), keys.detach().numpy(), values.detach().numpy())
    arguments = (*arrays, table, lens, arrays[0].dtype.type(scale), output.numpy())
    if threads == 1:
        _serial(*arguments, 1)
        return output
    with _one_at_a_time:
        numba.set_num_threads(threads)
        _parallel(*arguments, threads)
    return output


def _attend(  # type: ignore[no-untyped-def]
    query, keys, values, table, lens, scale, output, threads
) -> None:
    sequences, group, dim = query.shape
    size, value_dim = keys.shape[1], values.shape[2]
    before = np.zeros(sequences + 1, np.int64)  # pages of the sequences up to each
    for s in range(sequences):
        before[s + 1] = before[s] + (lens[s] + size - 1) // size
    total = before[sequences]
    peak = np.full((threads, sequences, group), -np.inf, query.dtype)
    mass = np.zeros((threads, sequences, group), query.dtype)
    mixed = np.zeros((threads, sequences, group, value_dim), query.dtype)
    for thread in numba.prange(threads):
        first, last = thread * total // threads, (thread + 1) * total // threads
        logits = np.empty((group, size), query.dtype)
        for s in range(sequences):
            for nth in range(max(first, before[s]) - before[s], min(last, before[s + 1]) - before[s]):
                page, filled = table[s, nth], min(size, lens[s] - nth * size)
                for j in range(filled):
                    for g in range(group):
                        logit = scale * 0
                        for d in range(dim):
                            logit += query[s, g, d] * keys[page, j, d]
                        logits[g, j] = logit * scale
                for g in range(group):
                    highest = peak[thread, s, g]
                    for j in range(filled):
                        highest = max(highest, logits[g, j])
                    if highest > peak[thread, s, g]:
                        shrink = np.exp(peak[thread, s, g] - highest)
                        peak[thread, s, g] = highest
                        mass[thread, s, g] *= shrink
                        for d in range(value_dim):
                            mixed[thread, s, g, d] *= shrink
                    added = scale * 0
                    for j in range(filled):
                        share = np.exp(logits[g, j] - highest)
                        logits[g, j] = share
                        added += share
                    mass[thread, s, g] += added
                for j in range(filled):
                    for g in range(group):
                        share = logits[g, j]
                        for d in range(value_dim):
                            mixed[thread, s, g, d] += share * values[page, j, d]
    for s in range(sequences):
        for g in range(group):
            highest = peak[0, s, g]
            for thread in range(1, threads):
                highest = max(highest, peak[thread, s, g])
            whole = scale * 0
            output[s, g] = 0
            for thread in range(threads):
                if mass[thread, s, g] != 0:  # NaN, too, which must come out again
                    shrink = np.exp(peak[thread, s, g] - highest)
                    whole += shrink * mass[thread, s, g]
                    for d in range(value_dim):
                        output[s, g, d] += shrink * mixed[thread, s, g, d]
            if whole != 0:
                for d in range(value_dim):
                    output[s, g, d] /= whole


def _compiled(parallel: bool) -> Callable[..., Any]:
    try:
        compiled = numba.njit(parallel=parallel, nogil=True, cache=True, fastmath=_FASTMATH)(_attend)
    except RuntimeError:  # no folder that numba may write: every process compiles anew
        compiled = numba.njit(parallel=parallel, nogil=True, fastmath=_FASTMATH)(_attend)
    return compiled  # type: ignore[no-any-return]


_serial, _parallel = _compiled(False), _compiled(True)
