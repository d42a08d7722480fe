"""Looking over a cache's shoulder: what attention could see, what policies were shown and decided."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from kvkeep.core.decision import KeepCounts, KeepDecision
from kvkeep.core.policy import Policy
from kvkeep.core.view import LayerView
from kvkeep.engine.generation import cache_argument
from kvkeep.engine.layer import RetentionLayer
from kvkeep.engine.retention_cache import RetentionCache
from kvkeep.engine.sparse_layer import SparseLayer
from kvkeep.engine.step import Step
from kvkeep.engine.surprise import entropy_of


@dataclass(frozen=True)
class Eviction:
    """One call of :meth:`Policy.decide`: what went in, copied, and what came out."""

    views: list[LayerView]
    counts: list[KeepCounts]
    decisions: list[KeepDecision]


def copy_view(view: LayerView) -> LayerView:
    """A view with tensors of its own: the engine's are overwritten when entries move."""

    def copied(value: Any) -> Any:
        return value.clone() if isinstance(value, Tensor) else value

    fields = {field.name: copied(getattr(view, field.name)) for field in dataclasses.fields(LayerView)}
    fields["recorded"] = {name: copied(value) for name, value in view.recorded.items()}
    return LayerView(**fields)


@dataclass(frozen=True)
class Replaced:
    """Values that an eviction changed.

    Parameters
    ----------
    since
        The first forward that attends to them.
    layer, row, head
        Whose.
    positions, values
        int64 ``[entries]`` and ``[entries, value_dim]``.
    """

    since: int
    layer: int
    row: int
    head: int
    positions: Tensor
    values: Tensor


class _Noting:
    """Stands in for a policy and notes its decisions, and the values that it changes."""

    def __init__(self, policy: Policy, cache: WatchedCache) -> None:
        self._policy, self._cache, self._notes = policy, cache, cache.noted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def decide(self, views: Sequence[LayerView], counts: Sequence[KeepCounts]) -> list[KeepDecision]:
        shown = [copy_view(view) for view in views]
        decisions = self._policy.decide(views, counts)
        self._notes.append(Eviction(shown, list(counts), decisions))
        return decisions

    def merge(self, view: LayerView, decision: KeepDecision) -> Tensor | None:
        values = self._policy.merge(view, decision)
        if values is None:
            return None
        rows = getattr(view, "rows", None) or range(view.shape[0])
        positions = view.positions.gather(-1, decision.indices)
        index = decision.indices[..., None].expand_as(values)
        changed = (view.values.gather(2, index) != values).any(-1)
        for source, row in enumerate(rows):
            for head, length in enumerate(decision.lengths[source].tolist()):
                which = changed[source, head, :length]
                self._cache.replaced.append(
                    Replaced(
                        len(self._cache.seen),
                        view.layer,
                        row,
                        head,
                        positions[source, head, :length][which],
                        values[source, head, :length][which],
                    )
                )
        return values


class WatchedCache(RetentionCache):
    """A cache that writes down what each attention could see, and every eviction.

    ``seen[forward][layer][row][head]`` holds positions, those of the forward's own tokens among them;
    ``head`` is a KV head, or a query head where query heads read different entries. ``replaced`` holds the
    values that evictions changed, in order. ``rounded``, in the way of ``seen``, holds those that have been
    in few bits, also where they are so no longer: lost bits do not come back. ``rounded_values`` is the same
    of values, which a merge gives anew: they are rounded again once they are written down.
    """

    def __init__(self, model: PreTrainedModel, policy: Policy, **options: Any) -> None:
        self.seen: list[dict[int, list[list[Tensor]]]] = []
        self.rounded: list[dict[int, list[list[Tensor]]]] = []
        self.rounded_values: list[dict[int, list[list[Tensor]]]] = []
        self.noted: list[Eviction] = []
        self.replaced: list[Replaced] = []
        super().__init__(model, policy, **options)
        self.evictor.policy = cast(Policy, _Noting(self.evictor.policy, self))

    def after_attention(self, layer: RetentionLayer, step: Step) -> None:
        """Look before anything is evicted."""
        if layer.place == 0:
            self.seen.append({})
            self.rounded.append({})
            self.rounded_values.append({})
        if self.precision is not None:
            self._note_rounded(layer)
        if isinstance(layer, SparseLayer):
            self.seen[-1][layer.index] = layer.positions_read()
        else:
            self.seen[-1][layer.index] = self.kept_positions(layer.index)
        super().after_attention(layer, step)

    def _note_rounded(self, layer: RetentionLayer) -> None:
        low, forward = layer.stored.low, len(self.seen) - 1
        stored, held = low.padded(None, "positions")["positions"].long(), low.held.tolist()
        given: dict[tuple[int, int], list[Tensor]] = {}
        for each in self.replaced:
            if (each.since, each.layer) == (forward, layer.index):
                given.setdefault((each.row, each.head), []).append(each.positions)
        for noted, anew in ((self.rounded, {}), (self.rounded_values, given)):
            before = noted[-2].get(layer.index) if forward else None
            noted[-1][layer.index] = [
                [
                    _and_earlier(
                        stored[row, head, :length],
                        None if before is None else before[row][head],
                        anew.get((row, head), []),
                    )
                    for head, length in enumerate(lengths)
                ]
                for row, lengths in enumerate(held)
            ]


def _and_earlier(now: Tensor, before: Tensor | None, anew: Sequence[Tensor]) -> Tensor:
    """Positions in few bits now or before, ascending; those that were given ``anew`` count only if now."""
    if before is None:
        return now.clone()
    for positions in anew:
        before = before[~torch.isin(before, positions)]
    return torch.cat([before, now]).unique()


def feed(
    model: PreTrainedModel, cache: Cache, ids: Tensor, mask: Tensor, lengths: Sequence[int]
) -> list[Tensor]:
    """Run a model over given tokens, so many columns at a time, from where the cache stands.

    Parameters
    ----------
    ids, mask
        ``[batch, columns]``, whatever the cache has seen before included.
    lengths
        Columns per forward.

    Returns
    -------
    list
        Logits ``[batch, length, vocabulary]``, one tensor per forward.
    """
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    start = cache.get_seq_length()
    logits: list[Tensor] = []
    for length in lengths:
        end = start + length
        if logits and isinstance(cache, RetentionCache) and cache.wants_entropy:
            cache.note_entropy(entropy_of(logits[-1][:, -1]))
        with torch.no_grad():
            output = model(
                input_ids=ids[:, start:end],
                attention_mask=mask[:, :end],
                position_ids=positions[:, start:end],
                **{cache_argument(model): cache},
            )
        logits.append(output.logits)
        start = end
    return logits


def pieces(columns: int, chunk: int | None = None) -> list[int]:
    """Cut so many columns into chunks; ``None`` takes all at once.

    Examples
    --------
    >>> pieces(10, 4), pieces(10)
    ([4, 4, 2], [10])
    """
    step = chunk or columns
    return [min(step, columns - start) for start in range(0, columns, step)]
