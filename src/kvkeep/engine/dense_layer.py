"""A layer whose heads all hold equally many entries: one block of memory, the stock attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from kvkeep.cache.dense import DenseStore
from kvkeep.core.arrays import IntArray
from kvkeep.core.decision import KeepDecision
from kvkeep.engine.attention import stock_attention
from kvkeep.engine.handle import LayerHandle
from kvkeep.engine.layer import Attend, RetentionLayer
from kvkeep.engine.step import Step


class DenseLayer(RetentionLayer):
    """Stores in a :class:`~kvkeep.cache.DenseStore`."""

    store: DenseStore | None

    def _lay_out(self, handle: LayerHandle, step: Step) -> DenseStore:
        capacity = self.cache.evictor.capacity_for(max(step.fresh, default=0))
        return DenseStore(handle.keys, handle.values, capacity, self.cache.extras)

    def restore_store(self, entries: dict[str, Tensor], held: list[list[int]]) -> None:
        """Take over entries ``[batch, kv_heads, entries, ...]`` by name."""
        stored = entries["keys"].shape[2]
        capacity = self.cache.evictor.capacity_for(stored)
        store = DenseStore(entries["keys"], entries["values"], capacity, self.cache.extras)
        store.lens = [lens[0] for lens in held]
        for name, tensor in store.padded().items():
            tensor.copy_(entries[name])
        self.store, self.is_initialized = store, True

    def _append(self, handle: LayerHandle, step: Step, extras: dict[str, Tensor] | None) -> None:
        store: DenseStore = self.stored
        longest = max(b + f for b, f in zip(store.lens, step.fresh, strict=True))
        if longest > store.capacity:
            store.resize(self.cache.evictor.capacity_for(longest))
        device = handle.keys.device
        uneven = step.query_len == 1 and not (store.even and not step.padded)
        slots = step.slots(store.lens, device) if uneven else None
        store.append(handle.keys, handle.values, step.positions(device), step.fresh, slots, extras)

    def _attend(
        self,
        before: IntArray,
        step: Step,
        attend: Attend,
        backend: str,
        module: Any,
        query: Tensor,
        options: dict[str, Any],
    ) -> tuple[Tensor, Any]:
        return self._attend_block(self.stored, before, step, attend, backend, module, query, options)

    @staticmethod
    def _attend_block(
        store: DenseStore,
        before: IntArray,
        step: Step,
        attend: Attend,
        backend: str,
        module: Any,
        query: Tensor,
        options: dict[str, Any],
    ) -> tuple[Tensor, Any]:
        lens = before[:, 0].tolist()
        entries, equal = store.longest, len(set(lens)) == 1
        keys, values = store.keys[:, :, :entries], store.values[:, :, :entries]
        if backend in ("flash_attention_2", "flash_attention_3"):
            # Flash attention aligns causality to the newest key; uneven rows go through SDPA.
            if equal and not step.padded:
                return attend(module, query, keys, values, None, **options)
            attend, backend = stock_attention("sdpa", module), "sdpa"
        mask = None
        if not (equal and not step.padded and step.query_len == 1):
            mask = step.mask(lens, query.dtype, query.device, additive=backend == "eager")
        return attend(module, query, keys, values, mask, **options)

    def _compact(self, rows: Sequence[int], decision: KeepDecision, kept: Sequence[int]) -> None:
        store: DenseStore = self.stored
        store.compact(rows, decision, kept)
        fitting = self.cache.evictor.capacity_for(store.longest)
        if store.capacity > fitting:
            store.resize(fitting)
