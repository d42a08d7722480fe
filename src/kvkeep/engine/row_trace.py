"""Entries stored by each sequence of a batch, measured step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvkeep.core.arrays import FloatArray, IntArray


@dataclass(frozen=True, kw_only=True)
class RowTrace:
    """Measured memory of one sequence.

    Parameters
    ----------
    sequence_id
        The row's name for the random source.
    steps
        Decode steps counted.
    mean_entries, peak_entries
        Mean and maximum over decode steps of the entries stored, averaged over managed layers and KV
        heads, *while the step attends*: after its token was appended, before an eviction. Without
        a decode step, the entries that the prompt left.
    mean_read, peak_read
        Mean and maximum of the entries that the steps read, averaged in the same way, each entry of a KV head
        counting once: all that is stored, unless a selector chooses.
    mean_read_by_query
        Mean of the entries that one query head read.
    mean_memory, peak_memory, prefill_memory
        As ``mean_entries``, ``peak_entries`` and ``prefill_entries``, but an entry in few bits counts as what
        its bytes are of those of an entry in 16 bits (:attr:`kvkeep.Precision.weight`): bytes, written down
        as entries. Equal to those where nothing is in few bits.
    prefill_entries
        Average of the entries stored when the prompt had been read (and evicted, if the policy evicts it at
        once).
    evictions
        Rounds of eviction.
    """

    sequence_id: int
    steps: int
    mean_entries: float
    peak_entries: float
    mean_read: float
    peak_read: float
    mean_read_by_query: float
    mean_memory: float
    peak_memory: float
    prefill_memory: float
    prefill_entries: float
    evictions: int


class RowCounter:
    """Running sums behind :class:`RowTrace`; host numbers only.

    Parameters
    ----------
    layers
        Managed layers.
    """

    def __init__(self, layers: int) -> None:
        # Of each layer, entries and what they weigh: [2, rows].
        self._held: list[np.ndarray | None] = [None] * layers
        self._steps = np.zeros(0)
        self._sums = self._peaks = self._first = np.zeros((2, 0))
        # Of what was read: distinct entries, entries per query head, and the largest number of the former.
        self._read = np.zeros((3, 0))

    def held(self, layer: int, lens: IntArray, weighed: FloatArray) -> None:
        """Note the entries of each row and head before an eviction, and what they weigh."""
        self._held[layer] = np.stack([np.asarray(lens, dtype=np.float64), weighed]).mean(axis=-1)

    def after_step(self, decode: bool, read: FloatArray | None = None) -> None:
        """All layers have been noted: count the forward.

        Parameters
        ----------
        read
            As for :meth:`~kvkeep.engine.trace.Counter.after_step`.
        """
        now = np.mean([entries for entries in self._held if entries is not None], axis=0)
        rows = now.shape[1]
        if len(self._steps) != rows:
            self._steps, self._read = np.zeros(rows), np.zeros((3, rows))
            self._sums, self._peaks = np.zeros((2, rows)), np.zeros((2, rows))
        if not decode:
            self._first = now
            return
        if not self._steps.any():
            self._first = now - 1
        self._steps = self._steps + 1
        self._sums = self._sums + now
        self._peaks = np.maximum(self._peaks, now)
        distinct, by_query = (now[0], now[0]) if read is None else read.mean(axis=(1, 3))
        self._read[:2] += distinct, by_query
        self._read[2] = np.maximum(self._read[2], distinct)

    def select(self, index: Sequence[int]) -> None:
        """Keep the rows ``index``, in that order, repeats allowed."""
        if len(self._steps):
            chosen = list(index)
            self._steps = self._steps[chosen]
            self._sums, self._peaks = self._sums[:, chosen], self._peaks[:, chosen]
            self._first, self._read = self._first[:, chosen], self._read[:, chosen]

    def traces(self, sequence_ids: Sequence[int], evictions: Sequence[int]) -> list[RowTrace]:
        """What was measured so far, one trace a row."""
        result = []
        for row, name in enumerate(sequence_ids):
            steps, (first, first_memory) = int(self._steps[row]), map(float, self._first[:, row])
            entries, memory = (float(total) / max(steps, 1) for total in self._sums[:, row])
            peak_entries, peak_memory = map(float, self._peaks[:, row])
            distinct, by_query, peak = (float(number) for number in self._read[:, row])
            result.append(
                RowTrace(
                    sequence_id=name,
                    steps=steps,
                    mean_entries=entries if steps else first,
                    peak_entries=peak_entries if steps else first,
                    mean_read=distinct / steps if steps else first,
                    peak_read=peak if steps else first,
                    mean_read_by_query=by_query / steps if steps else first,
                    mean_memory=memory if steps else first_memory,
                    peak_memory=peak_memory if steps else first_memory,
                    prefill_memory=first_memory,
                    prefill_entries=first,
                    evictions=int(evictions[row]),
                )
            )
        return result
