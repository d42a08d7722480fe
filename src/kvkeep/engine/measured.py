"""What a cache holds at this moment, read from its stores and counters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvkeep.cache.quantized import MixedStore
from kvkeep.cache.store import allocated
from kvkeep.core.arrays import FloatArray
from kvkeep.engine.trace import Trace

if TYPE_CHECKING:
    from kvkeep.engine.cache_state import CacheState
    from kvkeep.engine.layer import RetentionLayer


def allocated_bytes(cache: CacheState) -> tuple[int, int]:
    """Bytes of keys and values in managed layers, and bytes beside them in the stores."""
    return allocated([layer.store for layer in cache.managed_layers if layer.store is not None])


def reads_of(layers: Sequence[RetentionLayer]) -> FloatArray:
    """What the layers of a selector read in this step, fetched from the device at once.

    Returns
    -------
    FloatArray
        ``[2, layers, batch, kv_heads]``: distinct entries, and entries per query head.
    """
    counts = []
    for layer in layers:
        if layer.read is None:
            held = torch.from_numpy(layer.stored.held).to(layer.stored.device, torch.float64)
            counts.append(torch.stack([held, held]))
        else:
            counts.append(torch.stack([layer.read.distinct, layer.read.by_query]))
    first = counts[0].device  # layers of one model may stand on several devices
    return torch.stack([count.to(first) for count in counts], dim=1).cpu().numpy()


def trace_of(cache: CacheState) -> Trace:
    """Everything measured so far."""
    counter, (held, beside) = cache.counter, allocated_bytes(cache)
    means = counter.sums / max(counter.steps, 1)
    native = sum(
        tensor.nbytes
        for index, layer in enumerate(cache.layers)
        if index not in cache.spec.managed
        for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None))
        if isinstance(tensor, Tensor)
    )
    return Trace(
        policy=cache.policy.name,
        requested=cache.policy.request,
        tokens=tuple(cache.rows.seq_lens),
        steps=counter.steps,
        mean_entries=float(means.mean()),
        peak_entries=int(counter.peaks.max(initial=0)),
        mean_read=float(counter.reads.distinct.mean()) / max(counter.steps, 1),
        peak_read=int(counter.reads.peaks.max(initial=0)),
        mean_read_by_query=float(counter.reads.by_query.mean()) / max(counter.steps, 1),
        mean_by_layer_head=means.tolist(),
        peak_by_layer_head=counter.peaks.tolist(),
        evictions=counter.evictions,
        kv_bytes=held,
        peak_kv_bytes=max(counter.peak_bytes, held),
        metadata_bytes=beside
        + sum(
            layer.recorder.nbytes + layer.deferred.nbytes + layer.index_nbytes
            for layer in cache.managed_layers
        ),
        native_bytes=native,
        layers=cache.spec.managed,
        precision="" if cache.precision is None else str(cache.precision),
        few_bits_entries=max(
            (
                layer.store.low.longest
                for layer in cache.managed_layers
                if isinstance(layer.store, MixedStore)
            ),
            default=0,
        ),
    )
