"""A layer whose heads may hold different numbers of entries: pages of a shared pool, paged attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvkeep.cache.paged import PagedStore
from kvkeep.core.arrays import IntArray
from kvkeep.core.decision import KeepDecision
from kvkeep.engine.attention import stock_attention
from kvkeep.engine.handle import LayerHandle
from kvkeep.engine.layer import Attend, RetentionLayer
from kvkeep.engine.step import Step
from kvkeep.kernels.paged_attention import paged_attention

# What a stock attention function may be told that the paged one does not know.
_UNKNOWN = ("s_aux", "softcap")


class PagedLayer(RetentionLayer):
    """Stores in a :class:`~kvkeep.cache.PagedStore`."""

    store: PagedStore | None

    def _lay_out(self, handle: LayerHandle, step: Step) -> PagedStore:
        batch, heads = handle.keys.shape[:2]
        pool = self.cache.pools.pool_for(handle.keys, handle.values)
        return PagedStore(pool, batch, heads)

    def restore_store(self, entries: dict[str, Tensor], held: list[list[int]]) -> None:
        """Take over entries ``[total, ...]`` by name, without gaps, row by row, head by head."""
        pool = self.cache.pools.pool_for(entries["keys"], entries["values"])
        self.cache.pools.make_room_again(pool, np.array(held))
        store = PagedStore(pool, len(held), len(held[0]))
        store.unpack(entries, np.array(held))
        self.store, self.is_initialized = store, True

    def _append(self, handle: LayerHandle, step: Step, extras: dict[str, Tensor] | None) -> None:
        store: PagedStore = self.stored
        first = not store.held.any()
        if first or step.query_len > 1:
            self.cache.pools.make_room(store.pool, step.fresh, store.heads, self.place, first)
        store.append(handle.keys, handle.values, step.positions(handle.keys.device), step.fresh, extras)

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
        return self._attend_paged(self.stored, before, step, attend, backend, module, query, options)

    def _attend_paged(
        self,
        store: PagedStore,
        before: IntArray,
        step: Step,
        attend: Attend,
        backend: str,
        module: Any,
        query: Tensor,
        options: dict[str, Any],
    ) -> tuple[Tensor, Any]:
        plain = all(options.get(name) is None for name in _UNKNOWN) and not options.get("dropout")
        one_each = step.query_len == 1 and not step.padded
        if one_each and plain and backend != "eager" and not query.requires_grad:
            return self._attend_pages(store, query, options.get("scaling")), None
        stored = store.padded(None, "keys", "values")
        mask = self._mask(before, step, query, stored["keys"].shape[2])
        if backend == "eager":
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, torch.finfo(query.dtype).min)
        elif backend != "sdpa":  # flash attention takes no mask
            attend = stock_attention("sdpa", module)
        return attend(module, query, stored["keys"], stored["values"], mask, **options)

    @staticmethod
    def _attend_pages(store: PagedStore, query: Tensor, scaling: float | None) -> Tensor:
        """One new token: ``[batch, heads, 1, head_dim]`` in, ``[batch, 1, heads, value_dim]`` out."""
        batch, heads, _, dim = query.shape
        sequences = batch * store.heads
        output = paged_attention(
            query.reshape(sequences, heads // store.heads, dim),
            store.pool.keys,
            store.pool.values,
            store.table.reshape(sequences, -1),
            store.held.reshape(sequences),
            1 / math.sqrt(dim) if scaling is None else scaling,
        )
        return output.view(batch, 1, heads, -1)

    def _mask(self, before: IntArray, step: Step, query: Tensor, entries: int) -> Tensor:
        """bool ``[batch, heads, new, entries]``: every entry stored before, and new tokens up to oneself.

        A padding column sees the first slot, so that its softmax is defined; nobody reads its output.
        """
        device, group = query.device, query.shape[1] // self.stored.heads
        held = torch.from_numpy(before).to(device)[..., None]
        fresh = torch.tensor(step.fresh, device=device)[:, None, None]
        rank = torch.arange(step.query_len, device=device) - (step.query_len - fresh)
        visible = (held + rank + 1).clamp(min=1)
        mask = torch.arange(entries, device=device) < visible[..., None]
        return mask.repeat_interleave(group, 1)

    def _compact(self, rows: Sequence[int], decision: KeepDecision, kept: Sequence[int]) -> None:
        store: PagedStore = self.stored
        store.compact(rows, decision)
