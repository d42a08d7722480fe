"""When to evict, how much to ask of the policy, and carrying its decision out."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from kvkeep.core.decision import KeepCounts, KeepDecision
from kvkeep.core.errors import BudgetError, CacheError, CacheIntegrityError
from kvkeep.core.policy import Policy
from kvkeep.core.view import LayerView
from kvkeep.engine.eviction import Eviction, Observer
from kvkeep.engine.layer import RetentionLayer
from kvkeep.engine.rows import Rows
from kvkeep.engine.step import Step
from kvkeep.engine.trace import Counter
from kvkeep.engine.viewing import LayerViews

#: Slots are added in steps of this size while a cache without a bound grows.
GROWTH = 256


class Evictor:
    """Applies one policy to the layers of one cache.

    Parameters
    ----------
    policy
        Its budget is a count by now.
    rows, counter
        State of the cache that owns this.
    max_positions
        Longest sequence of the model: more slots are never laid out for a budget.
    context
        Longest sequence expected: preallocates a cache without a bound.
    profile
        Time evictions in :attr:`seconds`.
    observer
        Shown each layer's eviction before it is carried out.
    """

    def __init__(
        self,
        policy: Policy,
        rows: Rows,
        counter: Counter,
        *,
        max_positions: int | None,
        context: int | None,
        profile: bool,
        observer: Observer | None = None,
    ) -> None:
        self.policy, self.traits = policy, policy.traits
        self.rows, self.counter = rows, counter
        self.max_positions, self.context, self.profile = max_positions, context, profile
        self.observer = observer
        self.seconds = 0.0
        # Asked for by every layer, row and step: worth not deriving each time.
        self._count = policy.amount.count if policy.bounded else 0
        self._prompt_kept = policy.amount.prompt == "kept"

    def limit(self, row: int) -> int:
        """Entries per head that a row keeps at an eviction."""
        return self._count + (self.rows.prompt_lens[row] if self._prompt_kept else 0)

    def capacity_for(self, entries: int) -> int:
        """Slots per row to lay out so that ``entries`` fit and decoding needs no more.

        A function of the budget alone once the rows are inside it: budget and buffer (and a kept
        prompt). Only a prompt above the budget takes more, until its first eviction.
        """
        if not self.policy.bounded:
            return -(-max(entries, self.context or 0) // GROWTH) * GROWTH
        return self._until_evicted(entries, max(self.limit(row) for row in range(len(self.rows.seq_lens))))

    def most(self, row: int, entries: int = 0) -> int:
        """Entries per head that a row holds at most while it decodes, starting from so many."""
        if not self.policy.bounded:
            return max(entries, self.context or 0)
        return self._until_evicted(entries, self.limit(row))

    def _until_evicted(self, entries: int, kept: int) -> int:
        most = self.traits.trigger.fullest(stored=entries, budget=kept, buffer=self.policy.buffer)
        # A budget beyond every possible sequence must not be laid out in full.
        limit = self.max_positions
        return most if limit is None else max(entries, min(most, limit))

    def after_layer(self, layer: RetentionLayer, step: Step) -> bool:
        """A layer of a layer-scope policy has attended; whether it evicted."""
        if not self.policy.bounded or self.traits.scope != "layer":
            return False
        return self._evict([layer], self._due([layer], step))

    def after_model(self, layers: Sequence[RetentionLayer], step: Step) -> bool:
        """All layers have attended; whether a model-scope policy evicted."""
        if step.query_len > 1 and self.traits.trigger.prefill == "after":
            self.rows.prompt_waits = True
        if not self.policy.bounded or self.traits.scope != "model":
            return False
        return self._evict(layers, self._due(layers, step))

    def before_token(self, layers: Sequence[RetentionLayer]) -> bool:
        """A generated token is about to be stored: evict the prompt, or round it, if that was put off."""
        if not self.rows.prompt_waits:
            return False
        self.rows.prompt_waits = False
        groups = [layers] if self.traits.scope == "model" else [[layer] for layer in layers]
        evicted = self.policy.bounded and any(
            [self._evict(group, self._above_limit(group)) for group in groups]
        )
        return any([layer.demote() for layer in layers]) or evicted

    def _above_limit(self, layers: Sequence[RetentionLayer]) -> list[int]:
        return [row for row, stored in enumerate(_mean_entries(layers)) if stored > self.limit(row)]

    def _due(self, layers: Sequence[RetentionLayer], step: Step) -> list[int]:
        trigger = self.traits.trigger
        if step.query_len > 1:
            return self._above_limit(layers) if trigger.prefill == "chunk" else []
        entropy = self._entropy()
        return [
            row
            for row, stored in enumerate(_mean_entries(layers))
            if trigger.due(
                stored=stored,
                seen=self.rows.seq_lens[row],
                budget=self.limit(row),
                buffer=self.policy.buffer,
                entropy=entropy[row],
            )
        ]

    def _entropy(self) -> Sequence[float | None]:
        rows = self.rows
        if not self.traits.trigger.needs_entropy or rows.reading_prompt:
            return [None] * len(rows.seq_lens)
        if not rows.entropy:
            raise CacheError(
                f"{self.policy.name} evicts where the model is unsure, and nobody said how unsure it was: "
                "write with kvkeep.generate or kvkeep eval, call cache.note_entropy before each token, or "
                "use another trigger."
            )
        return rows.entropy

    def _evict(self, layers: Sequence[RetentionLayer], rows: list[int]) -> bool:
        if not rows:
            return False
        begin = self._clock(layers[0]) if self.profile else 0.0
        self._check_protection(rows)
        lens = [self.limit(row) for row in rows]
        counts = []
        for layer in layers:
            store = layer.stored
            if self.traits.attends:
                layer.recorder.sum_attention(store)
            per_head = torch.tensor(lens, device=store.device)[:, None].expand(-1, store.heads)
            counts.append(KeepCounts(per_head, max(lens)))
        views = [layers[0].view(rows)] if len(layers) == 1 else LayerViews(layers, rows)
        decisions = self.policy.decide(views, counts)
        for place, (layer, decision) in enumerate(zip(layers, decisions, strict=True)):
            self._check_shape(decision, len(rows), layer, max(lens))
            if self.observer is not None:
                names = tuple(self.rows.sequence_ids[row] for row in rows)
                self.observer(Eviction(view=views[place], decision=decision, sequence_ids=names))
            values = self._merged(views[place], decision) if self.traits.merges else None
            layer.compact(rows, decision, lens, values)
            self.counter.evicted(layer.place, len(rows))
        for row in rows:
            self.rows.evicted_at[row] = self.rows.seq_lens[row]
        if self.profile:
            self.seconds += self._clock(layers[0]) - begin
        return True

    def _merged(self, view: LayerView, decision: KeepDecision) -> Tensor | None:
        values = self.policy.merge(view, decision)
        wanted = (*decision.indices.shape, view.values.shape[-1])
        if values is not None and (tuple(values.shape), values.dtype) != (wanted, view.values.dtype):
            raise CacheIntegrityError(
                f"{self.policy.name} merged the values of layer {view.layer} into {values.dtype} of shape "
                f"{tuple(values.shape)}; expected {view.values.dtype}, [rows, kv_heads, kept, value_dim] = "
                f"{wanted}."
            )
        return values

    def _check_shape(self, decision: KeepDecision, rows: int, layer: RetentionLayer, kept: int) -> None:
        """What can be told without reading the device; :meth:`KeepDecision.check` tells the rest."""
        heads, shape = layer.stored.heads, tuple(decision.indices.shape)
        width = shape[-1] if self.traits.ragged else kept
        if shape != (rows, heads, width) or tuple(decision.lengths.shape) != (rows, heads):
            raise CacheIntegrityError(
                f"{self.policy.name} decided on layer {layer.index} with indices of shape {shape}; expected "
                f"[rows, kv_heads, kept] = {(rows, heads, width)}. Run kvkeep.testing.check_policy on the "
                "policy."
            )

    def _check_protection(self, rows: list[int]) -> None:
        if not self.policy.protects_prompt or self.policy.amount.prompt == "kept":
            return
        longest = max(self.rows.prompt_lens[row] for row in rows)
        if longest + self.policy.recent > self.policy.amount.count:
            raise BudgetError(
                f"{self.policy.name}: a prompt of {longest} tokens is protected and counts towards a budget "
                f"of {self.policy.amount.count} entries, which it does not fit: raise the budget, keep the "
                "prompt on top of it (prompt='kept'), or let the prompt compete (protect_prompt=False)."
            )

    def _clock(self, layer: RetentionLayer) -> float:
        if layer.stored.device.type == "cuda":
            torch.cuda.synchronize(layer.stored.device)
        return time.perf_counter()


def _mean_entries(layers: Sequence[RetentionLayer]) -> list[int]:
    """Entries per head of each row, averaged over heads and layers and rounded down.

    One token adds one to every head, so the mean goes up in steps of one, and a trigger that waits for
    a number meets it.
    """
    totals, heads = (
        sum(layer.stored.held.sum(axis=1) for layer in layers),
        len(layers) * layers[0].stored.heads,
    )
    return [int(total) // heads for total in totals]
