"""One managed layer: append, attend, record, and what a policy gets to see of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvkeep.cache.dense import DenseStore
from kvkeep.core.decision import KeepDecision
from kvkeep.core.errors import CacheError, UnsupportedError
from kvkeep.core.view import LayerView
from kvkeep.engine.handle import LayerHandle
from kvkeep.engine.recording import MomentSums, QueryRing, attention_received
from kvkeep.engine.step import Step
from kvkeep.engine.viewing import layer_view

if TYPE_CHECKING:
    from kvkeep.engine.retention_cache import RetentionCache


class RetentionLayer(CacheLayerMixin):
    """Cache layer of one full-attention layer.

    Parameters
    ----------
    cache
        The cache it belongs to, which owns everything that layers share.
    index, place
        Layer index in the model, and its place among the managed layers.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, cache: RetentionCache, index: int, place: int) -> None:
        super().__init__()
        self.cache, self.index, self.place = cache, index, place
        self.forget()

    def forget(self) -> None:
        """Back to the state before the first token."""
        self.store: DenseStore | None = None
        self.ring: QueryRing | None = None
        self.sums: MomentSums | None = None
        self.unsummed = 0
        self.evictions: list[int] = []
        self.is_initialized = False

    @property
    def stored(self) -> DenseStore:
        """The entries.

        Raises
        ------
        CacheError
            Before the first token.
        """
        if self.store is None:
            raise CacheError(f"layer {self.index} of this cache holds nothing yet.")
        return self.store

    @property
    def metadata_nbytes(self) -> int:
        """Bytes held beside keys and values: positions, accumulated attention, query ring, moment sums."""
        recorders = [each for each in (self.ring, self.sums) if each is not None]
        return (self.store.metadata_nbytes if self.store is not None else 0) + sum(
            tensor.nbytes
            for each in recorders
            for tensor in vars(each).values()
            if isinstance(tensor, Tensor)
        )

    # -- what transformers asks -----------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: memory is laid out by the first forward."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Hand the new tokens on to the attention function."""
        handle = LayerHandle(self, key_states, value_states)
        return handle, handle

    def get_seq_length(self) -> int:
        """Columns seen, padding included: the count that transformers derives positions from."""
        return self.cache.rows.columns

    def get_mask_sizes(self, query_length: int, *args: Any) -> tuple[int, int]:
        """Stored entries and the new columns; offset 0.

        Raises
        ------
        CacheError
            If there is no new column.
        """
        if query_length < 1:
            raise CacheError(
                f"there is no token to read: this cache has seen {self.cache.rows.columns} columns, and the "
                "input is not longer. Pass the whole conversation so far, or an empty cache for a new one."
            )
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
        with torch.no_grad():  # what is stored is not trained through, or every step would stay alive
            step = self.cache.open_step(self, query, request)
            before = self._append(handle, step)
        output = self._attend(handle, before, step, attend, backend, module, query, options)
        with torch.no_grad():
            self._record(query, step, options.get("scaling"))
            self.cache.after_attention(self, step)
        return output

    def _append(self, handle: LayerHandle, step: Step) -> list[int]:
        keys, values = handle.keys, handle.values
        if self.store is None:
            longest = max(step.fresh, default=0)
            capacity = self.cache.evictor.capacity_for(longest)
            extras = ("attention_sum",) if self.cache.traits.attention_sum else ()
            self.store = DenseStore(keys, values, capacity, extras)
            self.evictions = [0] * self.store.batch
            self.is_initialized = True
        store = self.store
        before = list(store.lens)
        longest = max(b + f for b, f in zip(before, step.fresh, strict=True))
        if longest > store.capacity:
            store.resize(self.cache.evictor.capacity_for(longest))
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
        store = self.stored
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

    def _record(self, query: Tensor, step: Step, scaling: float | None) -> None:
        traits = self.cache.traits
        if not (traits.queries or traits.query_moments or traits.attention_sum):
            return
        # Policies divide logits by sqrt(head_dim); a model that scales otherwise has it in its queries.
        factor = 1.0 if scaling is None else scaling * math.sqrt(query.shape[-1])
        if not math.isclose(factor, 1.0, rel_tol=1e-6):
            query = query * factor
        positions = step.positions(query.device)
        if traits.query_moments and self.cache.rows.reading_prompt and self.cache.rope is not None:
            if self.sums is None:
                self.sums = MomentSums(query, self.cache.rope)
            self.sums.add(query, positions)
        window = traits.queries
        if window and self.ring is None:
            self.ring = QueryRing(query, window)
        if traits.attention_sum:
            if self.unsummed + step.query_len > window:
                # The ring is about to lose queries that have not been summed.
                self.sum_attention(pending=step.query_len, in_line=not step.padded)
            if step.query_len > window:
                self._add_attention(query, positions, in_line=not step.padded)
            else:
                self.unsummed += step.query_len
        if self.ring is not None:
            self.ring.push(query, positions)
        if step.padded and traits.attention_sum:
            self.sum_attention(in_line=False)

    def sum_attention(self, *, pending: int = 0, in_line: bool = True) -> None:
        """Add the attention of the queries recorded since the last sum to their entries.

        Parameters
        ----------
        pending
            Tokens that are stored already but whose queries are not recorded yet.
        in_line
            Each of these queries has its token stored, one after the other: no padding.
        """
        if self.ring is None or not self.unsummed:
            return
        queries, positions = self.ring.ordered()
        count, self.unsummed = self.unsummed, 0
        self._add_attention(queries[:, :, -count:], positions[:, -count:], pending=pending, in_line=in_line)

    def _add_attention(
        self, queries: Tensor, positions: Tensor, *, pending: int = 0, in_line: bool, factor: float = 1.0
    ) -> None:
        store = self.stored
        in_line = in_line and store.even
        entries = store.longest - pending if in_line else store.longest
        sums, keys = store.extras["attention_sum"][:, :, :entries], store.keys[:, :, :entries]
        if in_line:
            sums += factor * attention_received(queries, positions, keys)
        else:
            where = store.positions[:, :, :entries]
            sums += factor * attention_received(queries, positions, keys, where, store.valid(entries))

    def _take_back_attention(self, removed: int) -> None:
        """Subtract what the newest ``removed`` queries have added already, as far as they are recorded."""
        summed = removed - self.unsummed
        self.unsummed = max(0, self.unsummed - removed)
        if self.ring is None or not self.cache.traits.attention_sum or summed <= 0:
            return
        queries, positions = self.ring.ordered()
        start = self.ring.window - removed
        part = slice(max(0, start), max(0, start + summed))
        self._add_attention(queries[:, :, part], positions[:, part], in_line=False, factor=-1.0)

    # -- eviction -------------------------------------------------------------------------------

    def view(self, rows: Sequence[int]) -> LayerView:
        """What the policy sees of the rows that evict now."""
        return layer_view(self, rows)

    def compact(self, rows: Sequence[int], decision: KeepDecision, new_lens: Sequence[int]) -> None:
        """Carry a decision out and give memory above the budget back."""
        store = self.stored
        store.compact(rows, decision, new_lens)
        for row in rows:
            self.evictions[row] += 1
        fitting = self.cache.evictor.capacity_for(store.longest)
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

    def truncate(self, removed: int, seq_lens: Sequence[int]) -> None:
        """Forget the newest ``removed`` entries; the sequences are now ``seq_lens`` long."""
        if self.store is None:
            return
        if self.ring is not None:
            self._take_back_attention(removed)
            self.ring.forget(removed, seq_lens)
        self.store.truncate([stored - removed for stored in self.store.lens])
