"""The cache that a user passes to ``generate``: it introduces model, storage and policy."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvkeep.core.errors import CacheError, ConfigError
from kvkeep.core.policy import Policy
from kvkeep.core.precision import Precision
from kvkeep.engine.arguments import (
    require_calibration,
    require_gates,
    require_ids,
    require_model,
    require_whole,
)
from kvkeep.engine.attention import prepare
from kvkeep.engine.cache_rows import CacheRows
from kvkeep.engine.dense_layer import DenseLayer
from kvkeep.engine.eviction import Observer
from kvkeep.engine.fitting import StoreKind, fit, store_kind
from kvkeep.engine.layer import RetentionLayer
from kvkeep.engine.measured import trace_of
from kvkeep.engine.mixed_layer import MixedDenseLayer, MixedPagedLayer
from kvkeep.engine.mixing import recorded_traits, refuse_precision, settled_precision, wanted_precision
from kvkeep.engine.paged_layer import PagedLayer
from kvkeep.engine.persistence import load_cache, save_cache
from kvkeep.engine.pools import spare_entries
from kvkeep.engine.row_trace import RowTrace
from kvkeep.engine.sparse_layer import SparseLayer
from kvkeep.engine.spec import model_spec
from kvkeep.engine.tap import tap
from kvkeep.engine.trace import Trace

# Entries that every policy with sane options can live with.
_NO_BUDGET_NEEDS = 1 << 16


class RetentionCache(CacheRows):
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
    gates
        Retention gates or block gates, for policies that need them (:func:`kvkeep.gates.load`). Retention
        gates read the input of each attention module through a hook that goes with the cache
        (:mod:`kvkeep.engine.tap`).
    profile
        Time evictions; read :attr:`eviction_seconds`.
    trace_rows
        Measure each sequence by itself; read :attr:`row_traces`.
    store
        ``"dense"``: all heads hold equally many entries, in one block per layer. ``"paged"``: heads may
        differ, in pages of a pool that all layers share. ``"auto"``: paged where the policy needs it.
    page_size
        Entries per page of the paged store.
    on_eviction
        Called with an :class:`~kvkeep.engine.eviction.Eviction` for each layer that evicts, before anything
        moves: what the policy saw and what it decided. It watches; it changes nothing.
    bits, protect
        Write entries down in 8, 4 or 2 bits; those that ``protect`` names keep full precision: ``"range"``
        (largest value ranges), ``"recent"``, ``"attention"``, ``"policy"``, ``"random"`` or ``"none"``.
    precision
        The same with every number: a :class:`~kvkeep.Precision` instead of ``bits`` and ``protect``.

    Raises
    ------
    UnsupportedError
        With every reason, if model, policy and engine do not fit.
    ConfigError, BudgetError
        If an argument is of the wrong kind, or the policy's budget cannot be right.

    Notes
    -----
    A forward of one token on a filled cache is taken for a generated token: a cache cannot tell it from
    the last token of a prompt. Where ``model.generate(prefill_chunk_size=...)`` leaves a single token for
    its last chunk, that token counts as generated: evictions may come before it, and a kept prompt ends
    one token early. :func:`kvkeep.generate` chooses chunks without such a rest.
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
        gates: Any = None,
        profile: bool = False,
        trace_rows: bool = False,
        store: StoreKind = "auto",
        page_size: int = 32,
        on_eviction: Observer | None = None,
        bits: int | None = None,
        protect: str = "range",
        precision: Precision | None = None,
    ) -> None:
        require_model(model)
        if not isinstance(policy, Policy):
            raise ConfigError(
                f"policy {policy!r} is not a policy object: pass kvkeep.policy('vase-attnv', "
                "budget=1024) or kvkeep.VaSEAttnV(budget=1024)."
            )
        self.seed, self._ids = require_whole("seed", seed, 0), require_ids(sequence_ids)
        context = None if context is None else require_whole("context", context, 8192, at_least=1)
        rows = None if rows is None else require_whole("rows", rows, 8, at_least=1)
        page_size = require_whole("page_size", page_size, 32, at_least=1)
        require_calibration(calibration)
        require_gates(gates)
        self.spec = model_spec(model.config)
        self.dtype = model.dtype
        self.store_kind, self._page_size = store_kind(store, policy), page_size
        heads = (rows or 1) * self.spec.kv_heads * len(self.spec.managed)
        asked = wanted_precision(bits, protect, precision)
        refuse_precision(asked, policy, self.spec)
        budget = policy.amount.resolve(
            context=context,
            rows=rows,
            bytes_per_entry=self.spec.bytes_per_entry(model.dtype.itemsize),
            buffer=policy.traits.trigger.room(policy.buffer),
            least=1 if policy.amount.kv_bytes is None else policy.smallest_budget(_NO_BUDGET_NEEDS),
            spare=spare_entries(page_size, heads) if self.store_kind == "paged" else 0,
        )
        if policy.bounded:
            _ = budget.count  # raises while a ratio or a size is unresolved
            policy = policy.with_budget(budget)
        self.policy, self.traits = policy, policy.traits
        #: What stays in full precision, and the bits of the rest; ``None``: all stays.
        self.precision = settled_precision(asked, policy)
        #: What layers record: what the policy asks for, and the rule of ``protect``.
        self.recorded = recorded_traits(self.traits, self.precision)
        self._context, self._profile, self._trace_rows = context, profile, trace_rows
        self._on_eviction = on_eviction
        #: Numbers that are kept per entry beside key, value and position.
        self.extras = self.traits.extras
        self.rope, self.calibration = fit(policy, model, self.spec, calibration, gates)
        dense = DenseLayer if self.traits.reads is None else SparseLayer
        kinds = (dense, PagedLayer) if asked is None else (MixedDenseLayer, MixedPagedLayer)
        kind: type[RetentionLayer] = kinds[self.store_kind == "paged"]
        #: The gates, if the policy asks for what they say.
        self.gates = gates if self.traits.log_retention else None
        #: The block gates, if the policy is a selector that asks for them.
        self.block_gates = None if self.traits.log_retention else gates if self.traits.gated else None
        prepare(model)
        if self.gates is not None:
            tap(model, self.spec, self)
        native = DynamicCache(config=self.spec.config).layers
        place = {index: place for place, index in enumerate(self.spec.managed)}
        layers: list[Any] = [
            kind(self, index, place[index]) if index in place else layer for index, layer in enumerate(native)
        ]
        super().__init__(layers=layers)
        #: The layers that kvkeep manages, in model order.
        self.managed_layers: list[RetentionLayer] = [layers[index] for index in self.spec.managed]
        self._start()

    @property
    def trace(self) -> Trace:
        """What was measured so far."""
        return trace_of(self)

    @property
    def row_traces(self) -> list[RowTrace]:
        """What was measured so far for each sequence of the batch (only with ``trace_rows=True``)."""
        if self._row_counter is None:
            raise CacheError("this cache measures the batch as a whole: build it with trace_rows=True.")
        if not self.rows.seq_lens:
            return []
        return self._row_counter.traces(self.rows.sequence_ids, self.evictions_by_row)

    @property
    def evictions_by_row(self) -> list[int]:
        """Rounds of eviction of each sequence of the batch so far."""
        rounds = np.min([layer.evictions for layer in self.managed_layers], axis=0)
        return [int(count) for count in rounds]

    def kept_positions(self, layer: int) -> list[list[Tensor]]:
        """Positions held now by a layer: one ascending int64 tensor per sequence and KV head.

        Raises
        ------
        CacheError
            If the layer is not managed by kvkeep.
        """
        if layer not in self.spec.managed:
            raise CacheError(
                f"layer {layer} keeps its own cache; kvkeep manages layers {list(self.spec.managed)}."
            )
        store = self.layers[layer].store
        if store is None:
            return []
        positions = store.padded(None, "positions")["positions"].long().cpu()
        return [
            [positions[row, head, :length].clone() for head, length in enumerate(lengths)]
            for row, lengths in enumerate(store.held.tolist())
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

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the cache to a safetensors file, whole or not at all.

        Raises
        ------
        UnsupportedError
            If a layer of another kind holds a state that kvkeep cannot write.
        """
        save_cache(self, path)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], model: PreTrainedModel, policy: Policy, **options: Any
    ) -> RetentionCache:
        """Read a cache that :meth:`save` wrote; generation goes on as if it had never stopped.

        Parameters
        ----------
        model, policy, options
            As for the constructor: the same model and policy that wrote the file.

        Raises
        ------
        DataFileError
            If the file is missing, damaged, or of another model or policy; says what differs.
        """
        cache = cls(model, policy, **options)
        load_cache(cache, path, model.device)
        return cache

    def __repr__(self) -> str:
        return f"RetentionCache({self.policy!r}, layers={len(self.spec.managed)})"
