"""A layer in two precisions: new tokens as they are, and from time to time the unprotected into few bits.

Full-precision entries run from ``precision.full_of`` the prompt to that and a buffer, and are then cut back,
in the step in which the policy evicts where it does: no step writes down token by token.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvkeep.cache.dense import DenseStore
from kvkeep.cache.paged import PagedStore
from kvkeep.cache.quantized import MixedStore, low_rows
from kvkeep.core.arrays import FloatArray, IntArray
from kvkeep.core.decision import KeepDecision
from kvkeep.core.precision import Precision
from kvkeep.engine.attention import stock_attention
from kvkeep.engine.dense_layer import DenseLayer
from kvkeep.engine.evictor import GROWTH
from kvkeep.engine.handle import LayerHandle
from kvkeep.engine.layer import Attend, RetentionLayer
from kvkeep.engine.paged_layer import PagedLayer
from kvkeep.engine.protecting import mixed_precision, protection, protection_scores
from kvkeep.engine.step import Step


class MixedLayer(RetentionLayer):
    """Stores in a :class:`~kvkeep.cache.quantized.MixedStore`; two kinds differ in how memory is laid out."""

    @property
    def precision(self) -> Precision:
        """What stays in full precision, and the bits of the rest."""
        return mixed_precision(self)

    @property
    def period(self) -> int:
        """Entries in full precision above those that stay so, when it is time to write some down."""
        return int(self.cache.policy.buffer)

    @property
    def weighed(self) -> FloatArray:
        return self.stored.weighed

    def _stay(self, row: int) -> int:
        """Entries per head of a row that stay in full precision."""
        return self.precision.full_of(self.cache.rows.prompt_lens[row])

    @property
    def _rows(self) -> int:
        return len(self.cache.rows.prompt_lens)

    def _append(self, handle: LayerHandle, step: Step, extras: dict[str, Tensor] | None) -> None:
        store: MixedStore[Any] = self.stored
        self._room_for_new(step)
        store.full.append(
            handle.keys, handle.values, step.positions(handle.keys.device), step.fresh, extras=extras
        )

    def _room_for_new(self, step: Step) -> None:
        """Lay memory out before new tokens are stored, where that does not happen by itself."""

    def _make_room(self, full: int, low: int) -> None:
        """Lay memory out for the longest head of either part, before the parts are written."""

    @abstractmethod
    def _attend_full(
        self,
        before: IntArray,
        step: Step,
        attend: Attend,
        backend: str,
        module: Any,
        query: Tensor,
        options: dict[str, Any],
    ) -> tuple[Tensor, Any]:
        """Attend while nothing is in few bits: just what the plain store does."""

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
        store: MixedStore[Any] = self.stored
        if not store.low.held.any():
            return self._attend_full(before, step, attend, backend, module, query, options)
        keys, values = store.side_by_side("keys"), store.side_by_side("values")
        mask = self._both_mask(step, query)
        if mask is not None and backend == "eager":
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, torch.finfo(query.dtype).min)
        elif backend not in ("eager", "sdpa"):  # flash attention takes no mask, and wants its keys in order
            attend = stock_attention("sdpa", module)
        return attend(module, query, keys, values, mask, **options)

    def _both_mask(self, step: Step, query: Tensor) -> Tensor | None:
        """bool ``[batch, heads, new, low + full entries]``: all older ones, and new ones up to oneself."""
        store: MixedStore[Any] = self.stored
        low, full, device = store.low, store.full, query.device
        even = all(bool((part.held == part.longest).all()) for part in (low, full))
        if even and step.query_len == 1 and not step.padded:
            return None
        fresh = torch.tensor(step.fresh, device=device)[:, None, None]
        rank = torch.arange(step.query_len, device=device) - (step.query_len - fresh)
        before = torch.from_numpy(full.held - np.asarray(step.fresh)[:, None]).to(device)[..., None]
        visible = (before + rank + 1).clamp(min=1)[..., None]
        newer = torch.arange(full.longest, device=device) < visible
        older = torch.arange(low.longest, device=device) < torch.from_numpy(low.held).to(device)[..., None]
        older = older[:, :, None].expand(-1, -1, step.query_len, -1)
        return torch.cat([older, newer], -1).repeat_interleave(query.shape[1] // store.heads, 1)

    # -- writing down -----------------------------------------------------------------------------

    def demote(self) -> bool:
        """Write down what is not protected, in rows whose part in full precision is full; whether any was."""
        store: MixedStore[Any] = self.stored
        most = np.array([self._stay(row) for row in range(store.batch)]) + self.period
        rows = np.flatnonzero(store.full.held.max(axis=1) >= most).tolist()
        if rows:
            self.settle()
            if self.cache.traits.attends:
                self.recorder.sum_attention(store)  # of the keys as they were attended to
            self._rearrange(rows, store.valid(self._entries(rows), rows))
        return bool(rows)

    def _compact(self, rows: Sequence[int], decision: KeepDecision, kept: Sequence[int]) -> None:
        entries, device = self._entries(rows), decision.indices.device
        counted = torch.arange(decision.max_kept, device=device) < decision.lengths[..., None]
        mask = torch.zeros(
            (*decision.indices.shape[:2], entries + 1), dtype=torch.bool, device=device
        )  # what stands behind a head's count is written to one slot more, which is cut off
        mask.scatter_(-1, decision.indices.masked_fill(~counted, entries), True)
        self._rearrange(rows, mask[..., :entries])

    def _entries(self, rows: Sequence[int]) -> int:
        return int(self.stored.held[list(rows)].max(initial=0))

    def _rearrange(self, rows: Sequence[int], kept: Tensor) -> None:
        store: MixedStore[Any] = self.stored
        scores = protection_scores(self, rows)
        protected = protection(self, rows, kept, store.is_low(rows), scores)
        store.rearrange(rows, kept, protected, self._make_room)
        self.cache.rows.demoted(rows)


class MixedDenseLayer(MixedLayer, DenseLayer):
    """Both parts in one block each."""

    store: Any

    def _lay_out(self, handle: LayerHandle, step: Step) -> Any:
        return self._empty(handle.keys, handle.values, max(step.fresh, default=0), 0)

    def _empty(self, keys: Tensor, values: Tensor, full: int, low: int) -> MixedStore[DenseStore]:
        extras = self.cache.extras
        few = low_rows(keys, values, self.precision)
        return MixedStore(
            DenseStore(keys, values, self._full_capacity(full), extras),
            DenseStore(*few, self._low_capacity(low), extras),
            self.precision,
        )

    def restore_parts(self, parts: dict[str, dict[str, Tensor]], held: dict[str, list[list[int]]]) -> None:
        """Take over the entries of ``full`` and ``low``, ``[batch, kv_heads, entries, ...]`` by name."""
        keys, values = parts["full"]["keys"], parts["full"]["values"]
        store = self._empty(keys, values, keys.shape[2], parts["low"]["keys"].shape[2])
        for name, part in (("full", store.full), ("low", store.low)):
            part.lens = [lens[0] for lens in held[name]]
            for tensor_name, tensor in part.padded().items():
                tensor.copy_(parts[name][tensor_name])
        self.store, self.is_initialized = store, True

    def _full_capacity(self, entries: int) -> int:
        """Slots for the part in full precision: no more than it comes to hold before it is cut back."""
        most = max(entries, max(map(self._stay, range(self._rows))) + self.period)
        return int(min(self.cache.evictor.capacity_for(entries), most))

    def _low_capacity(self, entries: int) -> int:
        """Slots for the part in few bits: what the budget leaves, once there is any."""
        if not entries:
            return 0
        evictor, rows = self.cache.evictor, range(self._rows)
        if not evictor.policy.bounded:
            expected = max(entries, (evictor.context or 0) - min(map(self._stay, rows)))
            return -(-expected // GROWTH) * GROWTH
        most = (min(evictor.limit(row), evictor.max_positions or evictor.limit(row)) for row in rows)
        return max(entries, *(each - self._stay(row) for row, each in zip(rows, most, strict=True)))

    def _room_for_new(self, step: Step) -> None:
        full = self.stored.full
        longest = max(b + f for b, f in zip(full.lens, step.fresh, strict=True))
        if longest > full.capacity:
            full.resize(self._full_capacity(longest))

    def _make_room(self, full: int, low: int) -> None:
        store: MixedStore[DenseStore] = self.stored
        for part, longest, capacity in (
            (store.full, full, self._full_capacity(full)),
            (store.low, low, self._low_capacity(low)),
        ):
            if longest > part.capacity:
                part.resize(capacity)

    def _rearrange(self, rows: Sequence[int], kept: Tensor) -> None:
        super()._rearrange(rows, kept)
        store: MixedStore[DenseStore] = self.stored
        for part, capacity in (
            (store.full, self._full_capacity(store.full.longest)),
            (store.low, self._low_capacity(store.low.longest)),
        ):
            if part.capacity > capacity:
                part.resize(capacity)

    def _attend_full(
        self,
        before: IntArray,
        step: Step,
        attend: Attend,
        backend: str,
        module: Any,
        query: Tensor,
        options: dict[str, Any],
    ) -> tuple[Tensor, Any]:
        full = self.stored.full
        return self._attend_block(full, before, step, attend, backend, module, query, options)


class MixedPagedLayer(MixedLayer, PagedLayer):
    """Both parts in pages, of a pool each."""

    store: Any

    def _lay_out(self, handle: LayerHandle, step: Step) -> Any:
        batch, heads = handle.keys.shape[:2]
        return self._empty(handle.keys, handle.values, batch, heads)

    def _empty(self, keys: Tensor, values: Tensor, batch: int, heads: int) -> MixedStore[PagedStore]:
        pools = self.cache.pools
        full, low = pools.pool_for(keys, values), pools.pool_for(*low_rows(keys, values, self.precision))
        return MixedStore(PagedStore(full, batch, heads), PagedStore(low, batch, heads), self.precision)

    def restore_parts(self, parts: dict[str, dict[str, Tensor]], held: dict[str, list[list[int]]]) -> None:
        """Take over the entries of ``full`` and ``low``, ``[total, ...]`` by name, without gaps."""
        keys, values = parts["full"]["keys"], parts["full"]["values"]
        store = self._empty(keys, values, len(held["full"]), len(held["full"][0]))
        for name, part in (("full", store.full), ("low", store.low)):
            lens = np.array(held[name])
            self.cache.pools.make_room_again(part.pool, lens)
            part.unpack(parts[name], lens)
        self.store, self.is_initialized = store, True

    def _room_for_new(self, step: Step) -> None:
        full = self.stored.full
        first = not self.stored.held.any()
        if first or step.query_len > 1:
            self.cache.pools.make_room(full.pool, step.fresh, full.heads, self.place, first)

    def _attend_full(
        self,
        before: IntArray,
        step: Step,
        attend: Attend,
        backend: str,
        module: Any,
        query: Tensor,
        options: dict[str, Any],
    ) -> tuple[Tensor, Any]:
        full = self.stored.full
        return self._attend_paged(full, before, step, attend, backend, module, query, options)
