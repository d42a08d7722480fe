"""Running sums of what attention read; host numbers only."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvkeep.core.arrays import FloatArray, IntArray


class ReadSums:
    """Entries read, per managed layer and KV head, summed over decode steps.

    Parameters
    ----------
    layers, heads
        Managed layers, and KV heads of each.
    """

    def __init__(self, layers: int, heads: int) -> None:
        self.distinct = np.zeros((layers, heads))
        self.by_query = np.zeros((layers, heads))
        self.peaks = np.zeros((layers, heads), dtype=np.int64)

    def add(self, read: FloatArray | IntArray) -> None:
        """Add a step: ``[2, layers, batch, kv_heads]``, distinct entries and entries per query head."""
        means = read.mean(axis=2)
        self.distinct, self.by_query = self.distinct + means[0], self.by_query + means[1]
        np.maximum(self.peaks, read[0].max(axis=1).astype(np.int64), out=self.peaks)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {name: value.tolist() for name, value in vars(self).items()}

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> ReadSums:
        """The sums that :meth:`as_dict` described."""
        sums = cls(*np.shape(saved["distinct"]))
        sums.distinct = np.array(saved["distinct"], dtype=np.float64)
        sums.by_query = np.array(saved["by_query"], dtype=np.float64)
        sums.peaks = np.array(saved["peaks"], dtype=np.int64)
        return sums
