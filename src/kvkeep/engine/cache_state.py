"""What the layers of a cache share, and how one forward goes through them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import Cache

from kvkeep.core.errors import CacheError
from kvkeep.core.policy import Policy
from kvkeep.core.precision import Precision
from kvkeep.core.spec import ModelSpec
from kvkeep.core.traits import Traits
from kvkeep.engine.eviction import Observer
from kvkeep.engine.evictor import Evictor
from kvkeep.engine.layer import RetentionLayer
from kvkeep.engine.measured import allocated_bytes, reads_of
from kvkeep.engine.pools import Pools
from kvkeep.engine.row_trace import RowCounter
from kvkeep.engine.rows import Rows
from kvkeep.engine.step import Step, count_fresh
from kvkeep.engine.trace import Counter


class CacheState(Cache):
    """The engine's side of a :class:`~kvkeep.RetentionCache`, which lays out what is declared here."""

    policy: Policy
    traits: Traits
    spec: ModelSpec
    #: What stays in full precision, and the bits of the rest; ``None``: all stays.
    precision: Precision | None
    #: Numbers that are kept per entry beside key, value and position.
    extras: tuple[str, ...]
    #: The layers that kvkeep manages, in model order.
    managed_layers: list[RetentionLayer]

    _ids: Sequence[int] | None
    _context: int | None
    _page_size: int
    _profile: bool
    _trace_rows: bool
    _on_eviction: Observer | None

    def _start(self) -> None:
        self.rows, self.counter = Rows(), Counter(len(self.spec.managed), self.spec.kv_heads)
        self._row_counter = RowCounter(len(self.spec.managed)) if self._trace_rows else None
        self._bind()

    def _bind(self) -> None:
        self.evictor = Evictor(
            self.policy,
            self.rows,
            self.counter,
            max_positions=self.spec.max_positions,
            context=self._context,
            profile=self._profile,
            observer=self._on_eviction,
        )
        self.pools = Pools(self.evictor, len(self.spec.managed), self._page_size, self.extras, self.precision)
        self._step: Step | None = None

    def restore_state(self, rows: Rows, counter: Counter) -> None:
        """Take over the shared state that a file held."""
        self.rows, self.counter = rows, counter
        self._bind()

    @property
    def eviction_seconds(self) -> float:
        """Time spent on evictions so far (only with ``profile=True``)."""
        return self.evictor.seconds

    def open_step(self, layer: RetentionLayer, query: Tensor, request: Any) -> Step:
        """The current forward; the first managed layer opens it."""
        if layer.place > 0 and self._step is not None:
            return self._step
        if self._step is not None:
            raise CacheError(
                "an earlier forward stopped half-way, and some layers hold its tokens while others do not: "
                "start again with an empty cache (cache.reset() empties it)."
            )
        batch, _, query_len, _ = query.shape
        rows = self.rows
        rows.admit(batch, self._ids)
        if query_len == 1 and self.evictor.before_token(self.managed_layers):
            self.pools.give_back(batch)
        fresh = count_fresh(request, rows.seq_lens, query_len)
        self._step = Step(rows.seq_lens, fresh, query_len, request, query.device)
        rows.advance(fresh, query_len)
        return self._step

    def after_attention(self, layer: RetentionLayer, step: Step) -> None:
        """Called by each managed layer when it has attended: evict if it is time, and count."""
        counter, layers = self.counter, self.managed_layers
        last = layer.place == len(layers) - 1
        held = layer.stored.held
        counter.held(layer.place, held)
        if self._row_counter is not None:
            self._row_counter.held(layer.place, held, layer.weighed)
        if last:
            counter.peak_bytes = max(counter.peak_bytes, allocated_bytes(self)[0])
        evicted = self.evictor.after_layer(layer, step)
        # A prompt that is evicted as a whole, once it has been read, is left as it is until then.
        waits = step.query_len > 1 and self.traits.trigger.prefill == "after"
        if self.traits.scope == "layer" and not waits:
            evicted = layer.demote() or evicted
        if last:
            evicted = self.evictor.after_model(layers, step) or evicted
            if self.traits.scope == "model" and not waits:
                evicted = any([each.demote() for each in layers]) or evicted
            if evicted:
                self.pools.give_back(held.shape[0])
            # A prompt of a single token is read, not decoded.
            decode = step.query_len == 1 and not self.rows.reading_prompt
            read = reads_of(layers) if decode and self.traits.reads is not None else None
            counter.after_step([each.stored.held for each in layers], decode=decode, read=read)
            if self._row_counter is not None:
                self._row_counter.after_step(decode=decode, read=read)
            self.rows.columns += step.query_len
            self.rows.entropy = []
            self._step = None

    @property
    def wants_entropy(self) -> bool:
        """Whether :meth:`note_entropy` must be called before each token."""
        return self.traits.trigger.needs_entropy

    def note_entropy(self, nats: Tensor | Sequence[float]) -> None:
        """Say how unsure the model is of the next token of each row, before that token is stored.

        Parameters
        ----------
        nats
            Entropy of each row's next-token distribution, ``[batch]``
            (:func:`kvkeep.engine.surprise.entropy_of`). It holds for one forward.

        Raises
        ------
        CacheError
            If there are more or fewer numbers than rows, or one is no entropy.
        """
        given = [float(each) for each in (nats.tolist() if isinstance(nats, Tensor) else nats)]
        rows = len(self.rows.seq_lens)
        if len(given) != rows:
            raise CacheError(f"{len(given)} entropies were noted for a cache of {rows} sequences.")
        if not all(each >= -1e-4 for each in given):  # rounding; NaN is refused
            raise CacheError(f"entropies {given} are not all numbers of at least 0 nats.")
        self.rows.entropy = given
