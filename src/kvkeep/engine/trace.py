"""What was measured while a cache was used: entries stored and bytes held, not what was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kvkeep.core.arrays import FloatArray, IntArray
from kvkeep.core.budget import format_bytes
from kvkeep.engine.read_sums import ReadSums


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Measured memory of one cache, so far.

    Parameters
    ----------
    policy, requested
        What was asked for.
    tokens
        Tokens seen, per sequence.
    steps
        Decode steps counted (forwards of one token).
    mean_entries, peak_entries
        Entries per KV head and layer: mean over decode steps, layers, heads and sequences, after the
        step's eviction; and the most that any head of any layer held at any time.
    mean_read, peak_read
        Entries per KV head and layer that attention read, each once however many query heads read it: mean
        over decode steps, layers, heads and sequences, and the most of any head. A policy that evicts reads
        all that is stored while a step attends, its newest token included; a selector reads less.
    mean_read_by_query
        Entries that one query head read, on average: less than ``mean_read`` where query heads choose alone.
    mean_by_layer_head, peak_by_layer_head
        The same per managed layer and KV head, ``[layers][kv_heads]``.
    evictions
        Evictions carried out, summed over sequences (a round over all layers counts once).
    kv_bytes, peak_kv_bytes
        Bytes allocated for keys and values now, and at most: managed layers only.
    metadata_bytes, native_bytes
        Bytes beside keys and values (positions, accumulated attention, recorded queries, query moments);
        bytes of layers that keep their own cache.
    layers
        Indices of the managed layers.
    precision
        What stays in full precision, and the bits of the rest; empty if all stays.
    few_bits_entries
        Entries that the fullest head holds in few bits now.
    """

    policy: str
    requested: str
    tokens: tuple[int, ...]
    steps: int
    mean_entries: float
    peak_entries: int
    mean_read: float
    peak_read: int
    mean_read_by_query: float
    mean_by_layer_head: list[list[float]]
    peak_by_layer_head: list[list[int]]
    evictions: int
    kv_bytes: int
    peak_kv_bytes: int
    metadata_bytes: int
    native_bytes: int
    layers: tuple[int, ...]
    precision: str = ""
    few_bits_entries: int = 0

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)

    def __str__(self) -> str:
        evicted = f"{self.evictions} evictions" if self.evictions else "0 evicted"
        sparse = self.mean_read < self.mean_entries
        read = f" (read: mean {self.mean_read:.1f}, peak {self.peak_read})" if sparse else ""
        return (
            f"{self.policy}: asked {self.requested}, measured mean {self.mean_entries:.1f} and peak "
            f"{self.peak_entries} entries per head{read}, {format_bytes(self.kv_bytes)} (peak "
            f"{format_bytes(self.peak_kv_bytes)}), {evicted}"
            + (f"; {self.few_bits_entries} entries per head in {self.precision}" if self.precision else "")
        )


class Counter:
    """Running sums behind a :class:`Trace`; host numbers only.

    Parameters
    ----------
    layers, heads
        Managed layers, and KV heads of each.
    """

    def __init__(self, layers: int, heads: int) -> None:
        self.steps = 0
        self.sums = np.zeros((layers, heads))
        self.peaks = np.zeros((layers, heads), dtype=np.int64)
        self.reads = ReadSums(layers, heads)
        self.by_layer = np.zeros(layers, dtype=np.int64)
        self._attended: list[IntArray] = [np.zeros((1, heads), dtype=np.int64)] * layers
        self.peak_bytes = 0

    @property
    def evictions(self) -> int:
        """Rounds over all layers, summed over sequences."""
        return int(self.by_layer.min())

    def evicted(self, layer: int, rows: int) -> None:
        """Note that a layer evicted in so many rows."""
        self.by_layer[layer] += rows

    def after_step(self, held: Sequence[IntArray], decode: bool, read: FloatArray | None = None) -> None:
        """Count one forward.

        Parameters
        ----------
        held
            Entries per layer now, ``[batch, kv_heads]`` each.
        read
            What was read, ``[2, layers, batch, kv_heads]``: distinct entries, and entries per query head;
            ``None`` for all that was stored.
        """
        if decode:
            self.steps += 1
            self.sums += np.stack(held).mean(axis=1)
            self.reads.add(np.stack([self._attended] * 2) if read is None else read)

    def held(self, layer: int, entries: IntArray) -> None:
        """Note how much a layer holds at its fullest moment, before an eviction: ``[batch, kv_heads]``."""
        np.maximum(self.peaks[layer], entries.max(axis=0), out=self.peaks[layer])
        self._attended[layer] = entries

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "steps": self.steps,
            "sums": self.sums.tolist(),
            "peaks": self.peaks.tolist(),
            "reads": self.reads.as_dict(),
            "by_layer": self.by_layer.tolist(),
            "peak_bytes": self.peak_bytes,
        }

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Counter:
        """The counter that :meth:`as_dict` described."""
        counter = cls(*np.shape(saved["sums"]))
        counter.steps, counter.peak_bytes = saved["steps"], saved["peak_bytes"]
        counter.sums = np.array(saved["sums"], dtype=np.float64)
        counter.peaks = np.array(saved["peaks"], dtype=np.int64)
        counter.by_layer = np.array(saved["by_layer"], dtype=np.int64)
        counter.reads = ReadSums.from_dict(saved["reads"])
        return counter
