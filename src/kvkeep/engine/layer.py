"""One managed layer: append, attend, record, and what a policy gets to see of it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvkeep.cache.store import Store
from kvkeep.core.arrays import FloatArray, IntArray
from kvkeep.core.decision import KeepDecision
from kvkeep.core.errors import CacheError, UnsupportedError
from kvkeep.core.view import LayerView
from kvkeep.engine.attention import HIDDEN
from kvkeep.engine.deferred import DeferredGates
from kvkeep.engine.handle import LayerHandle
from kvkeep.engine.reading import ReadCount
from kvkeep.engine.recorder import Recorder
from kvkeep.engine.step import Step
from kvkeep.engine.viewing import layer_view

if TYPE_CHECKING:
    from kvkeep.engine.retention_cache import RetentionCache

Attend = Callable[..., tuple[Tensor, Any]]


class RetentionLayer(CacheLayerMixin):
    """Cache layer of one full-attention layer; how it stores and attends is left to its two kinds.

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
        self.store: Any = None
        self.recorder = Recorder(self.cache.recorded, self.cache.rope)
        self.deferred = DeferredGates(self.cache.gates, self.index)
        self.evictions: list[int] = []
        #: What the newest forward read, where that is less than everything stored.
        self.read: ReadCount | None = None
        self.is_initialized = False

    @property
    def stored(self) -> Any:
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
    def weighed(self) -> FloatArray:
        """Memory of each head: entries in 16 bits that would take the same bytes, ``[batch, kv_heads]``."""
        return np.asarray(self.stored.held, dtype=np.float64)

    @property
    def index_nbytes(self) -> int:
        """Bytes kept per block of entries for a selector."""
        return 0

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
        attend: Attend,
        backend: str,
        module: Any,
        query: Tensor,
        request: Any,
        options: dict[str, Any],
    ) -> tuple[Tensor, Any]:
        """Store the new tokens, attend to everything stored, record, let the cache evict."""
        with torch.no_grad():  # what is stored is not trained through, or every step would stay alive
            step = self.cache.open_step(self, query, request)
            if self.store is None:
                self.store = self._lay_out(handle, step)
                self.evictions = [0] * self.store.batch
                self.is_initialized = True
            before = self.store.held
            extras = self._extras(options.pop(HIDDEN, None), module, step)
            self._append(handle, step, extras)
            if self.deferred.full:
                self.settle()
        if before.any():
            self._check_causal(step)
            output = self._attend(before, step, attend, backend, module, query, options)
        else:
            # Nothing stored yet: exactly what a stock cache would compute, mask included.
            mask = step.request.stock() if hasattr(step.request, "stock") else step.request
            output = attend(module, query, handle.keys, handle.values, mask, **options)
        with torch.no_grad():
            self.recorder.record(
                query,
                step,
                self.store,
                scaling=options.get("scaling"),
                prompt=self.cache.rows.reading_prompt,
            )
            self.cache.after_attention(self, step)
        return output

    def _extras(self, hidden: Tensor | None, module: Any, step: Step) -> dict[str, Tensor] | None:
        """What the gates say of the new tokens: ``[batch, kv_heads, new]`` by name; ``None`` if it waits."""
        if self.cache.gates is None:
            return None
        if hidden is None:
            raise UnsupportedError(
                f"retention gates on layer {self.index}",
                [
                    f"{type(module).__name__} did not pass its input on to the attention function: build the "
                    "cache before the model is compiled, and without hooks of your own that drop arguments"
                ],
            )
        if step.query_len == 1 and not step.padded and self.store.held.any():
            self.deferred.wait(hidden)
            return None
        self.settle()  # the waiting tokens are the newest no longer
        return {"log_retention": self.cache.gates(self.index, hidden)}

    def settle(self) -> None:
        """Let the gates catch up with the tokens stored."""
        if self.store is not None:
            self.deferred.settle(self.store)

    @staticmethod
    def _check_causal(step: Step) -> None:
        if getattr(step.request, "causal", True) or step.query_len == 1:
            return
        raise UnsupportedError(
            "several tokens at once on a filled cache",
            [
                "the model asks for a mask that is not causal (image blocks); send them with the "
                "first prompt instead"
            ],
        )

    @abstractmethod
    def _lay_out(self, handle: LayerHandle, step: Step) -> Store:
        """An empty store for the first tokens."""

    @abstractmethod
    def restore_store(self, entries: dict[str, Tensor], held: list[list[int]]) -> None:
        """Take over entries that a file held, and how many each head has: ``[batch, kv_heads]``."""

    @abstractmethod
    def _append(self, handle: LayerHandle, step: Step, extras: dict[str, Tensor] | None) -> None:
        """Store the new tokens, and ``extras`` per entry by name."""

    @abstractmethod
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
        """Attend to what is stored, the new tokens included.

        Parameters
        ----------
        before
            Entries held before this forward, ``[batch, kv_heads]``.
        attend, backend, module, query, options
            Of the stock back end.
        """

    # -- eviction -------------------------------------------------------------------------------

    def view(self, rows: Sequence[int]) -> LayerView:
        """What the policy sees of the rows that evict now."""
        self.settle()
        return layer_view(self, rows)

    def compact(
        self,
        rows: Sequence[int],
        decision: KeepDecision,
        kept: Sequence[int],
        values: Tensor | None = None,
    ) -> None:
        """Carry a decision out and give memory above the budget back.

        Parameters
        ----------
        kept
            Entries per head of each row, where all heads keep equally many.
        values
            New values of what is kept, ``[rows, kv_heads, max_kept, value_dim]``; ``None``: as they are.
        """
        self._compact(rows, decision, kept)
        if values is not None:
            self.stored.set_values(rows, values)
        for row in rows:
            self.evictions[row] += 1

    @abstractmethod
    def _compact(self, rows: Sequence[int], decision: KeepDecision, kept: Sequence[int]) -> None:
        """Move what stays together."""

    def demote(self) -> bool:
        """Write entries down in few bits, where the layer does that and it is time; whether it did."""
        return False

    # -- rows -----------------------------------------------------------------------------------

    def select_rows(self, index: Sequence[int]) -> None:
        """Keep the rows ``index``, in that order, repeats allowed."""
        if self.store is None:
            return
        self.settle()
        self.store.select_rows(index)
        self.recorder.select_rows(torch.tensor(list(index), device=self.store.device))
        self.evictions = [self.evictions[row] for row in index]

    def forget_newest(self, removed: int, seq_lens: Sequence[int]) -> None:
        """Forget the newest ``removed`` entries; the sequences are now ``seq_lens`` long."""
        if self.store is None:
            return
        self.settle()
        self.recorder.forget_newest(removed, seq_lens, self.store)
        self.store.forget_newest(removed)
