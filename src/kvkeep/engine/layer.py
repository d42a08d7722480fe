"""One managed layer: append, attend, record, and what a policy gets to see of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvkeep.cache.dense import DenseStore
from kvkeep.core.decision import KeepCounts, KeepDecision
from kvkeep.core.errors import UnsupportedError
from kvkeep.core.random import RandomStream
from kvkeep.core.view import LayerView, protected_mask
from kvkeep.engine.handle import LayerHandle
from kvkeep.engine.recording import MomentSums, QueryRing, attention_received
from kvkeep.engine.step import Step

if TYPE_CHECKING:
    from kvkeep.engine.retention_cache import RetentionCache


class RetentionLayer(CacheLayerMixin):
    """Cache layer of one full-attention layer.

    Parameters
    ----------
    cache
        The cache it belongs to, which owns everything that layers share.
    index
        Layer index in the model.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, cache: RetentionCache, index: int) -> None:
        super().__init__()
        self.cache, self.index = cache, index
        self.forget()

    def forget(self) -> None:
        """Back to the state before the first token."""
        self.store: DenseStore | None = None
        self.ring: QueryRing | None = None
        self.sums: MomentSums | None = None
        self.unsummed = 0
        self.evictions: list[int] = []
        self.is_initialized = False

    # -- what transformers asks -----------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: memory is laid out by the first forward."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Hand the new tokens on to the attention function."""
        handle = LayerHandle(self, key_states, value_states)
        return handle, handle

    def get_seq_length(self) -> int:
        """Columns seen, padding included: the count that transformers derives positions from."""
        return self.cache.columns

    def get_mask_sizes(self, query_length: int, *args: Any) -> tuple[int, int]:
        """Stored entries and the new columns; offset 0."""
        stored = self.store.longest if self.store is not None else 0
        return stored + int(query_length), 0

    def get_max_length(self) -> int:
        """No limit on tokens seen."""
        return -1

    get_max_cache_shape = get_max_length

    def reset(self) -> None:
        """Forget everything."""
        self.forget()

    def offload(self) -> None:
        """Not offered: what stays is small."""

    prefetch = offload

    # -- one forward ----------------------------------------------------------------------------

    @torch._dynamo.disable
    def forward(
        self,
        handle: LayerHandle,
        attend: Callable[..., tuple[Tensor, Any]],
        backend: str,
        module: Any,
        query: Tensor,
        request: Any,
        options: dict[str, Any],
    ) -> tuple[Tensor, Any]:
        """Store the new tokens, attend to everything stored, record, let the cache evict."""
        step = self.cache.step_for(self, query, request)
        before = self._append(handle, step)
        output = self._attend(handle, before, step, attend, backend, module, query, options)
        self._record(query, step)
        self.cache.after_attention(self, step)
        return output

    def _append(self, handle: LayerHandle, step: Step) -> list[int]:
        keys, values = handle.keys, handle.values
        if self.store is None:
            longest = max(step.fresh, default=0)
            capacity = self.cache.capacity_for(longest, batch=keys.shape[0])
            extras = ("attention_sum",) if self.cache.traits.attention_sum else ()
            self.store = DenseStore(keys, values, capacity, extras)
            self.evictions = [0] * self.store.batch
            self.is_initialized = True
        store = self.store
        before = list(store.lens)
        longest = max(b + f for b, f in zip(before, step.fresh, strict=True))
        if longest > store.capacity:
            store.resize(self.cache.capacity_for(longest, batch=store.batch))
        uneven = step.query_len == 1 and not (store.even and not step.padded)
        slots = step.slots(before, keys.device) if uneven else None
        store.append(keys, values, step.positions(keys.device), step.fresh, slots)
        return before

    def _attend(
        self,
        handle: LayerHandle,
        before: list[int],
        step: Step,
        attend: Callable[..., tuple[Tensor, Any]],
        backend: str,
        module: Any,
        query: Tensor,
        options: dict[str, Any],
    ) -> tuple[Tensor, Any]:
        store = self.store
        if store is None:
            raise AssertionError("attention before append")
        request = step.request
        if not any(before):
            # Nothing stored yet: exactly what a stock cache would compute, mask included.
            mask = request.stock() if hasattr(request, "stock") else request
            return attend(module, query, handle.keys, handle.values, mask, **options)
        if not getattr(request, "causal", True) and step.query_len > 1:
            raise UnsupportedError(
                "several tokens at once on a filled cache",
                [
                    "the model asks for a mask that is not causal (image blocks); send them with the "
                    "first prompt instead"
                ],
            )
        entries = store.longest
        keys, values = store.keys[:, :, :entries], store.values[:, :, :entries]
        plain = len(set(before)) == 1 and not step.padded and step.query_len == 1
        if backend in ("flash_attention_2", "flash_attention_3"):
            # Flash attention aligns causality to the newest key; uneven rows go through SDPA.
            if len(set(before)) == 1 and not step.padded:
                return attend(module, query, keys, values, None, **options)
            from kvkeep.engine.attention import stock_attention

            attend, backend = stock_attention("sdpa", module), "sdpa"
        mask = None
        if not plain:
            mask = step.mask(before, query.dtype, query.device, additive=backend == "eager")
        return attend(module, query, keys, values, mask, **options)

    def _record(self, query: Tensor, step: Step) -> None:
        traits, store = self.cache.traits, self.store
        if store is None or not (traits.queries or traits.query_moments or traits.attention_sum):
            return
        positions = step.positions(query.device)
        if traits.query_moments and self.cache.reading_prompt and self.cache.rope is not None:
            if self.sums is None:
                self.sums = MomentSums(query, self.cache.rope)
            self.sums.add(query, positions)
        window = traits.queries
        if window and self.ring is None:
            self.ring = QueryRing(query, window)
        if traits.attention_sum:
            if self.unsummed + step.query_len > window:
                self.sum_attention()  # the ring is about to lose queries that have not been summed
            if step.query_len > window:
                self._add_attention(query, positions)
            else:
                self.unsummed += step.query_len
        if self.ring is not None:
            self.ring.push(query, positions)

    def sum_attention(self) -> None:
        """Add the attention of the queries recorded since the last sum to their entries."""
        if self.ring is None or not self.unsummed:
            return
        queries, positions = self.ring.ordered()
        self._add_attention(queries[:, :, -self.unsummed :], positions[:, -self.unsummed :])
        self.unsummed = 0

    def _add_attention(self, queries: Tensor, positions: Tensor) -> None:
        store = self.store
        if store is None:
            return
        entries = store.longest
        store.extras["attention_sum"][:, :, :entries] += attention_received(
            queries,
            positions,
            store.keys[:, :, :entries],
            store.positions[:, :, :entries].long(),
            store.valid(entries),
        )

    # -- eviction -------------------------------------------------------------------------------

    def view(self, rows: Sequence[int], counts: KeepCounts) -> LayerView:
        """What the policy sees of the rows that evict now."""
        cache, store = self.cache, self.store
        if store is None:
            raise AssertionError("view before append")
        policy, traits = cache.policy, cache.traits
        everyone = list(rows) == list(range(store.batch))
        entries = max(store.lens[row] for row in rows)
        device = store.keys.device
        index = torch.tensor(list(rows), device=device)

        def take(tensor: Tensor) -> Tensor:
            return tensor if everyone else tensor.index_select(0, index)

        seq_lens = torch.tensor([cache.seq_lens[row] for row in rows], device=device)
        prompt_lens = torch.tensor([cache.prompt_lens[row] for row in rows], device=device)
        positions = take(store.positions[:, :, :entries]).long()
        valid = store.valid(entries, rows)
        recorded: dict[str, Any] = {}
        if traits.queries and self.ring is not None:
            queries, times = self.ring.ordered()
            recorded |= {"queries": take(queries), "query_positions": take(times)}
        if traits.attention_sum:
            recorded["attention_sum"] = take(store.extras["attention_sum"][:, :, :entries])
        if traits.query_moments and self.sums is not None:
            moments = self.sums.moments()
            recorded["query_moments"] = type(moments)(take(moments.mean), take(moments.covariance))
        if traits.calibration:
            recorded["calibration"] = cache.calibration[self.index]
        if traits.rope:
            recorded["rope"] = cache.rope
        if traits.random:
            recorded["random"] = RandomStream.derive(
                seed=cache.seed,
                sequence_ids=torch.tensor([cache.sequence_ids[row] for row in rows], device=device),
                layer=self.index,
                evictions=torch.tensor([self.evictions[row] for row in rows], device=device),
            )
        return LayerView(
            layer=self.index,
            keys=take(store.keys[:, :, :entries]),
            values=take(store.values[:, :, :entries]),
            positions=positions,
            valid=valid,
            seq_lens=seq_lens,
            prompt_lens=prompt_lens,
            budget=policy.amount.count,
            buffer=policy.buffer,
            protected=protected_mask(
                positions=positions,
                valid=valid,
                seq_lens=seq_lens,
                sinks=policy.sinks,
                recent=policy.recent,
                prompt_lens=prompt_lens if policy.protects_prompt else None,
            ),
            traits=traits,
            recorded=recorded,
            even=len({store.lens[row] for row in rows}) == 1,
        )

    def compact(self, rows: Sequence[int], decision: KeepDecision, new_lens: Sequence[int]) -> None:
        """Carry a decision out and give memory above the budget back."""
        store = self.store
        if store is None:
            raise AssertionError("compaction before append")
        store.compact(rows, decision, new_lens)
        for row in rows:
            self.evictions[row] += 1
        fitting = self.cache.capacity_for(store.longest, batch=store.batch)
        if store.capacity > fitting:
            store.resize(fitting)

    # -- rows -----------------------------------------------------------------------------------

    def select_rows(self, index: Sequence[int]) -> None:
        """Keep the rows ``index``, in that order, repeats allowed."""
        if self.store is None:
            return
        self.store.select_rows(index)
        chosen = torch.tensor(list(index), device=self.store.keys.device)
        for recorder in (self.ring, self.sums):
            if recorder is not None:
                recorder.select_rows(chosen)
        self.evictions = [self.evictions[row] for row in index]

    def truncate(self, lens: Sequence[int], seq_lens: Sequence[int]) -> None:
        """Forget the newest entries: keep ``lens`` entries of sequences now ``seq_lens`` long."""
        if self.store is None:
            return
        self.store.truncate(lens)
        if self.ring is not None:
            self.ring.forget_from(seq_lens)
