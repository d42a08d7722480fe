"""The cache that a user passes to ``generate``: it introduces model, storage and policy."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from kvkeep.core.decision import KeepCounts
from kvkeep.core.errors import BudgetError, CacheError, ConfigError, UnsupportedError
from kvkeep.core.policy import Policy
from kvkeep.core.view import Rope
from kvkeep.engine.attention import prepare
from kvkeep.engine.layer import RetentionLayer
from kvkeep.engine.spec import model_spec, rope_of
from kvkeep.engine.step import Step, count_fresh
from kvkeep.engine.trace import Counter, Trace

# Slots are added in steps of this size while a cache without a bound, or a prompt, grows.
_GROWTH = 256


class RetentionCache(Cache):
    """A KV cache of bounded size for ``model.generate(..., past_key_values=cache)``.

    Full-attention layers are stored and evicted by kvkeep; layers of other kinds (sliding window,
    recurrent) keep the cache that transformers gives them. Building it sets the model's attention
    function (:func:`~kvkeep.prepare`); :func:`~kvkeep.restore` sets it back.

    Parameters
    ----------
    model
        A causal language model of transformers.
    policy
        What to keep, for example ``kvkeep.VaSEAttnV(budget=1024)``. One object may serve any number of
        caches: it holds no state.
    seed
        Run seed of stochastic policies.
    sequence_ids
        One number per row of the batch, the rows' names for the random source: a sequence with the
        same seed and id evicts the same entries in any batch. Default: 0, 1, 2 …
    context, rows
        Longest sequence expected, in tokens, and number of sequences: needed to resolve a budget given as a
        ratio or in bytes. ``context`` also preallocates a cache without a bound.
    calibration
        Statistics for policies that need them (:func:`kvkeep.calibration.load`).
    profile
        Time evictions; read :attr:`eviction_seconds`.

    Raises
    ------
    UnsupportedError
        With every reason, if model, policy and engine do not fit.
    ConfigError, BudgetError
        If the policy object or its budget cannot be right.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        policy: Policy,
        *,
        seed: int = 0,
        sequence_ids: Sequence[int] | None = None,
        context: int | None = None,
        rows: int | None = None,
        calibration: Any = None,
        profile: bool = False,
    ) -> None:
        if not isinstance(policy, Policy):
            raise ConfigError(
                f"policy {policy!r} is not a policy object: pass kvkeep.policy('vase-attnv', "
                "budget=1024) or kvkeep.VaSEAttnV(budget=1024)."
            )
        self.spec = model_spec(model.config)
        self._dtype = model.dtype
        budget = policy.amount.resolve(
            context=context,
            rows=rows,
            bytes_per_entry=self.spec.bytes_per_entry(model.dtype.itemsize),
            buffer=policy.buffer,
        )
        if policy.bounded:
            _ = budget.count  # raises while a ratio or a size is unresolved
            policy = policy.with_budget(budget)
        self.policy, self.traits = policy, policy.traits
        self.seed, self.context, self.profile = int(seed), context, profile
        self._requested_ids = None if sequence_ids is None else [int(i) for i in sequence_ids]
        self.calibration: Mapping[int, Any] = {}
        self.rope: Rope | None = None
        self._check_fit(model, calibration)
        prepare(model)
        native = DynamicCache(config=self.spec.config).layers
        managed = set(self.spec.managed)
        layers = [
            RetentionLayer(self, index) if index in managed else layer for index, layer in enumerate(native)
        ]
        super().__init__(layers=layers)
        self._start()

    def _check_fit(self, model: PreTrainedModel, calibration: Any) -> None:
        reasons = list(self.policy.check(self.spec))
        if self.traits.log_retention:
            reasons.append("the policy needs trained retention gates, which this cache does not carry")
        if self.traits.calibration and calibration is None:
            reasons.append(
                "the policy needs calibration statistics of this model: run `kvkeep calibrate` and pass "
                "calibration=kvkeep.calibration.load(path)"
            )
        if self.traits.rope or self.traits.query_moments:
            try:
                self.rope = rope_of(model, self.spec)
            except UnsupportedError as error:
                reasons.extend(error.reasons)
        if self.traits.calibration and calibration is not None and self.rope is not None:
            reasons.extend(calibration.check(self.spec, self.rope))
            self.calibration = calibration.layers
        if reasons:
            raise UnsupportedError(f"{self.policy.name} cannot run on {self.spec.model_type!r} here", reasons)

    def _start(self) -> None:
        self.columns = 0
        self.seq_lens: list[int] = []
        self.prompt_lens: list[int] = []
        self.sequence_ids: list[int] = []
        self.reading_prompt = True
        self.eviction_seconds = 0.0
        self._step: Step | None = None
        self._prompt_waits = False
        self._evicted_at: list[int] = []
        self._counter = Counter(len(self.spec.managed))
        self._order = {index: place for place, index in enumerate(self.spec.managed)}

    @property
    def managed_layers(self) -> list[RetentionLayer]:
        """The layers that kvkeep manages, in model order."""
        return [self.layers[index] for index in self.spec.managed]

    # -- the engine's side ----------------------------------------------------------------------

    def capacity_for(self, entries: int, *, batch: int) -> int:
        """Slots per row to lay out so that ``entries`` fit and decoding needs no more.

        A function of the budget alone once the rows are inside it: budget and buffer (and a kept
        prompt). Only a prompt above the budget takes more, until its first eviction.
        """
        if not self.policy.bounded:
            wanted = max(entries, self.context or 0)
            return -(-wanted // _GROWTH) * _GROWTH
        kept = max(self.prompt_lens, default=0) if self.policy.amount.prompt == "kept" else 0
        steady = self.policy.amount.count + kept + self.policy.buffer
        if entries <= steady:
            limit = self.spec.max_positions
            # A budget beyond every possible sequence must not be laid out in full.
            return steady if limit is None else max(entries, min(steady, limit))
        return entries + self.policy.buffer if self.reading_prompt else entries

    def step_for(self, layer: RetentionLayer, query: Tensor, request: Any) -> Step:
        """The current forward; the first managed layer opens it."""
        if self._order[layer.index] == 0 or self._step is None:
            self._open_step(query, request)
        if self._step is None:
            raise AssertionError("no step")
        return self._step

    def _open_step(self, query: Tensor, request: Any) -> None:
        batch, _, query_len, _ = query.shape
        if not self.seq_lens:
            self._first_rows(batch)
        if batch != len(self.seq_lens):
            raise CacheError(
                f"this cache holds {len(self.seq_lens)} sequences and was given {batch}: use one cache per "
                "batch (cache.reset() empties it)."
            )
        if query_len == 1 and self._prompt_waits:
            self._evict_prompt()
        started = all(self.seq_lens)
        if not started or query_len > 1:
            fresh = count_fresh(request, batch, query_len, started)
        else:
            fresh = [1] * batch
            if isinstance(request, Tensor):
                count_fresh(request, batch, query_len, started)
        self._step = Step(self.seq_lens, fresh, query_len, request, query.device)
        self.seq_lens = [seen + new for seen, new in zip(self.seq_lens, fresh, strict=True)]
        if started and query_len == 1:
            self.reading_prompt = False
        if self.reading_prompt:
            self.prompt_lens = list(self.seq_lens)
        if query_len > 1 and self.traits.trigger.prefill == "after":
            self._prompt_waits = True

    def _first_rows(self, batch: int) -> None:
        ids = self._requested_ids if self._requested_ids is not None else list(range(batch))
        if len(ids) != batch:
            raise ConfigError(f"{len(ids)} sequence_ids were given for a batch of {batch} sequences.")
        self.sequence_ids = list(ids)
        self.seq_lens, self.prompt_lens = [0] * batch, [0] * batch
        self._evicted_at = [0] * batch

    def after_attention(self, layer: RetentionLayer, step: Step) -> None:
        """Called by each managed layer when it has attended: evict if it is time, count."""
        store = layer.store
        if store is None:
            raise AssertionError("attention before append")
        self._counter.held(self._order[layer.index], store.longest)
        last = self._order[layer.index] == len(self._order) - 1
        if last:
            held = sum(each.store.nbytes for each in self.managed_layers if each.store)
            self._counter.peak_bytes = max(self._counter.peak_bytes, held)
        if self.policy.bounded:
            if self.traits.scope == "layer":
                self._evict([layer], self._due_rows(layer, step))
            elif last:
                self._evict(self.managed_layers, self._due_rows(layer, step))
        if last:
            lens = np.array([each.store.lens for each in self.managed_layers if each.store])
            self._counter.after_step(lens, decode=step.query_len == 1)
            self.columns += step.query_len

    def _limit(self, row: int) -> int:
        kept = self.prompt_lens[row] if self.policy.amount.prompt == "kept" else 0
        return self.policy.amount.count + kept

    def _due_rows(self, layer: RetentionLayer, step: Step) -> list[int]:
        trigger, store = self.traits.trigger, layer.store
        if store is None:
            return []
        if step.query_len > 1:
            if trigger.prefill != "chunk":
                return []
            return [row for row, stored in enumerate(store.lens) if stored > self._limit(row)]
        return [
            row
            for row, stored in enumerate(store.lens)
            if trigger.due(
                stored=stored,
                seen=self.seq_lens[row],
                budget=self._limit(row),
                buffer=self.policy.buffer,
            )
        ]

    def _evict_prompt(self) -> None:
        """The prompt has been read in full and the first new token is about to arrive."""
        self._prompt_waits = False
        layers = self.managed_layers
        groups = [layers] if self.traits.scope == "model" else [[layer] for layer in layers]
        for group in groups:
            store = group[0].store
            if store is not None:
                due = [row for row, stored in enumerate(store.lens) if stored > self._limit(row)]
                self._evict(group, due)

    def _evict(self, layers: list[RetentionLayer], rows: list[int]) -> None:
        if not rows:
            return
        begin = self._clock() if self.profile else 0.0
        lens = [self._limit(row) for row in rows]
        self._check_protection(rows)
        views, counts = [], []
        for layer in layers:
            if self.traits.attention_sum:
                layer.sum_attention()
            if layer.store is None:
                raise AssertionError("eviction before append")
            device = layer.store.keys.device
            heads = layer.store.keys.shape[1]
            per_head = torch.tensor(lens, device=device)[:, None].expand(-1, heads)
            counts.append(KeepCounts(per_head, max(lens)))
            views.append(layer.view(rows, counts[-1]))
        decisions = self.policy.decide(views, counts)
        for layer, decision in zip(layers, decisions, strict=True):
            layer.compact(rows, decision, lens)
        for row in rows:
            self._evicted_at[row] = self.seq_lens[row]
        if layers[-1] is self.managed_layers[-1]:
            self._counter.evictions += len(rows)
        if self.profile:
            self.eviction_seconds += self._clock() - begin

    def _check_protection(self, rows: list[int]) -> None:
        if not self.policy.protects_prompt or self.policy.amount.prompt == "kept":
            return
        longest = max(self.prompt_lens[row] for row in rows)
        if longest + self.policy.recent > self._limit(rows[0]):
            raise BudgetError(
                f"{self.policy.name}: a prompt of {longest} tokens is protected and counts towards a budget "
                f"of {self.policy.amount.count} entries, which it does not fit: raise the budget, keep the "
                "prompt on top of it (prompt='kept'), or let the prompt compete (protect_prompt=False)."
            )

    def _clock(self) -> float:
        store = self.managed_layers[0].store
        if store is not None and store.keys.is_cuda:
            torch.cuda.synchronize(store.keys.device)
        return time.perf_counter()

    # -- the user's side ------------------------------------------------------------------------

    @property
    def trace(self) -> Trace:
        """What was measured so far."""
        counter, stores = self._counter, [e.store for e in self.managed_layers if e.store]
        steps = max(counter.steps, 1)
        heads = self.spec.kv_heads
        native = sum(
            tensor.nbytes
            for index, layer in enumerate(self.layers)
            if index not in self._order
            for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None))
            if isinstance(tensor, Tensor)
        )
        means = counter.sums / steps
        return Trace(
            policy=self.policy.name,
            requested=str(self.policy.amount) if self.policy.bounded else "everything",
            tokens=tuple(self.seq_lens),
            steps=counter.steps,
            mean_entries=float(means.mean()),
            peak_entries=int(counter.peaks.max(initial=0)),
            mean_by_layer_head=[[float(mean)] * heads for mean in means],
            peak_by_layer_head=[[int(peak)] * heads for peak in counter.peaks],
            evictions=counter.evictions,
            kv_bytes=sum(store.nbytes for store in stores),
            peak_kv_bytes=max(counter.peak_bytes, sum(store.nbytes for store in stores)),
            metadata_bytes=sum(store.metadata_nbytes for store in stores),
            native_bytes=native,
            layers=self.spec.managed,
        )

    def kept_positions(self, layer: int) -> list[list[Tensor]]:
        """Positions held now by a layer: one ascending int64 tensor per sequence and KV head.

        Raises
        ------
        CacheError
            If the layer is not managed by kvkeep.
        """
        if layer not in self._order:
            raise CacheError(
                f"layer {layer} keeps its own cache; kvkeep manages layers {list(self.spec.managed)}."
            )
        store = self.layers[layer].store
        if store is None:
            return []
        return [
            [store.positions[row, head, :length].long().cpu() for head in range(store.keys.shape[1])]
            for row, length in enumerate(store.lens)
        ]

    def check_integrity(self) -> None:
        """Verify the bookkeeping of every layer (reads the device; for tests).

        Raises
        ------
        CacheIntegrityError
            If it does not add up.
        """
        for layer in self.managed_layers:
            if layer.store is not None:
                layer.store.check_integrity()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns seen, padding included; stored entries are in :attr:`trace`."""
        return self.columns

    def reset(self) -> None:
        """Empty the cache for a new batch; policy and seed stay."""
        super().reset()
        self._start()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Follow the beams: row ``i`` becomes what row ``beam_idx[i]`` was."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times."""
        rows = len(self.seq_lens)
        self.batch_select_indices(torch.arange(rows).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices``, in that order, repeats allowed."""
        index = [int(row) for row in indices.tolist()]
        for place, layer in enumerate(self.layers):
            if place in self._order:
                layer.select_rows(index)
            elif getattr(layer, "keys", None) is not None:
                layer.batch_select_indices(indices.to(layer.keys.device))
        for name in ("seq_lens", "prompt_lens", "sequence_ids", "_evicted_at"):
            values = getattr(self, name)
            setattr(self, name, [values[row] for row in index] if values else values)

    def crop(self, max_length: int) -> None:
        """Forget the newest tokens: a negative number removes so many, a positive one is the new length.

        Raises
        ------
        CacheError
            If it reaches back past an eviction: what was evicted cannot be brought back.
        """
        removed = -max_length if max_length <= 0 else max(0, self.columns - max_length)
        if removed == 0:
            return
        lens = [seen - removed for seen in self.seq_lens]
        if removed > self.columns or any(
            length < evicted for length, evicted in zip(lens, self._evicted_at, strict=True)
        ):
            raise CacheError(
                f"cannot crop {removed} tokens: the last eviction happened after "
                f"{max(self._evicted_at, default=0)} tokens, and what it evicted is gone. Crop less, or "
                "evict less often (a larger budget or buffer)."
            )
        for place, layer in enumerate(self.layers):
            if place not in self._order:
                layer.crop(max_length)
            elif layer.store is not None:
                layer.truncate([stored - removed for stored in layer.store.lens], lens)
        self.seq_lens, self.columns = lens, self.columns - removed
        if self.reading_prompt:
            self.prompt_lens = list(lens)

    def __repr__(self) -> str:
        return f"RetentionCache({self.policy!r}, layers={len(self.spec.managed)})"
