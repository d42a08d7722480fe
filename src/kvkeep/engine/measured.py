"""What a cache holds at this moment, read from its stores and counters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from kvkeep.cache.store import allocated
from kvkeep.engine.trace import Trace

if TYPE_CHECKING:
    from kvkeep.engine.retention_cache import RetentionCache


def allocated_bytes(cache: RetentionCache) -> tuple[int, int]:
    """Bytes of keys and values in managed layers, and bytes beside them in the stores."""
    return allocated([layer.store for layer in cache.managed_layers if layer.store is not None])


def trace_of(cache: RetentionCache) -> Trace:
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
        requested=str(cache.policy.amount) if cache.policy.bounded else "everything",
        tokens=tuple(cache.rows.seq_lens),
        steps=counter.steps,
        mean_entries=float(means.mean()),
        peak_entries=int(counter.peaks.max(initial=0)),
        mean_by_layer_head=means.tolist(),
        peak_by_layer_head=counter.peaks.tolist(),
        evictions=counter.evictions,
        kv_bytes=held,
        peak_kv_bytes=max(counter.peak_bytes, held),
        metadata_bytes=beside
        + sum(layer.recorder.nbytes + layer.deferred.nbytes for layer in cache.managed_layers),
        native_bytes=native,
        layers=cache.spec.managed,
    )
