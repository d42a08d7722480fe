"""What a policy gets to see of a layer: the rows that evict, and what its traits ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, overload

import torch
from torch import Tensor

from kvkeep.core.random import RandomStream
from kvkeep.core.view import LayerView, QueryMoments, protected_mask

if TYPE_CHECKING:
    from kvkeep.engine.layer import RetentionLayer


def layer_view(layer: RetentionLayer, rows: Sequence[int]) -> LayerView:
    """Build the view of some rows of a layer.

    All rows at once are seen in place; a part of them is copied.
    """
    cache, store = layer.cache, layer.stored
    policy, traits = cache.policy, cache.traits
    everyone = list(rows) == list(range(store.batch))
    held, device = store.held[list(rows)], store.device
    entries = int(held.max(initial=0))
    index = torch.tensor(list(rows), device=device)

    def take(tensor: Tensor) -> Tensor:
        return tensor if everyone else tensor.index_select(0, index)

    seq_lens = torch.tensor([cache.rows.seq_lens[row] for row in rows], device=device)
    prompt_lens = torch.tensor([cache.rows.prompt_lens[row] for row in rows], device=device)
    chosen = None if everyone else rows
    stored = store.padded(chosen, "positions", *(f"extra.{name}" for name in store.extras))
    positions = stored["positions"].long()
    valid = store.valid(entries, rows)
    ring, sums = layer.recorder.ring, layer.recorder.sums
    recorded: dict[str, Any] = {}
    if traits.queries and ring is not None:
        queries, times = ring.ordered()
        queries, times = queries[:, :, -traits.queries :], times[:, -traits.queries :]
        recorded |= {"queries": take(queries), "query_positions": take(times)}
    if traits.attention_sum:
        recorded["attention_sum"] = stored["extra.attention_sum"]
    if traits.recurrence is not None:
        # Kept as the distance from the entry's own position: zero is right for a token that has just come.
        recorded["last_attended"] = stored["extra.idle_start"] + positions
        recorded["longest_pause"] = stored["extra.longest_pause"]
    if traits.log_retention:
        recorded["log_retention"] = stored["extra.log_retention"]
    if traits.query_moments and sums is not None:
        moments = sums.moments()
        recorded["query_moments"] = QueryMoments(take(moments.mean), take(moments.covariance))
    if traits.calibration:
        recorded["calibration"] = cache.calibration[layer.index]
    if traits.rope:
        recorded["rope"] = cache.rope
    if traits.random:
        recorded["random"] = RandomStream.derive(
            seed=cache.seed,
            sequence_ids=torch.tensor([cache.rows.sequence_ids[row] for row in rows], device=device),
            layer=layer.index,
            evictions=torch.tensor([layer.evictions[row] for row in rows], device=device),
        )
    return StoredView(
        store=store,
        rows=chosen,
        layer=layer.index,
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
        even=bool((held == entries).all()),
        recent_kept=policy.recent,
    )


class Entries(Protocol):
    """Where a view fetches entries from: a store, or pages of another engine."""

    def padded(self, rows: Sequence[int] | None = None, *names: str) -> dict[str, Tensor]:
        """What is stored, every head as long as the longest: ``[rows, kv_heads, entries, ...]`` by name."""


@dataclass(frozen=True, kw_only=True)
class StoredView(LayerView):
    """A view that fetches keys and values when they are first read: pages must be copied to be looked at.

    Parameters
    ----------
    store, rows
        Where from; ``None`` for all rows.
    """

    store: Entries
    rows: Sequence[int] | None
    keys: Tensor = field(init=False, repr=False)
    values: Tensor = field(init=False, repr=False)

    def __getattr__(self, name: str) -> Tensor:
        if name not in ("keys", "values"):
            raise AttributeError(name)
        tensor = self.store.padded(self.rows, name)[name]
        object.__setattr__(self, name, tensor)
        return tensor


class LayerViews(Sequence[LayerView]):
    """Views of several layers, each built when it is looked at.

    The entries of a paged layer are copied into its view, so holding all views would double the cache.
    """

    def __init__(self, layers: Sequence[RetentionLayer], rows: Sequence[int]) -> None:
        self._layers, self._rows = layers, rows

    def __len__(self) -> int:
        return len(self._layers)

    @overload
    def __getitem__(self, place: int) -> LayerView: ...

    @overload
    def __getitem__(self, place: slice) -> LayerViews: ...

    def __getitem__(self, place: int | slice) -> LayerView | LayerViews:
        if isinstance(place, slice):
            return LayerViews(self._layers[place], self._rows)
        return self._layers[place].view(self._rows)
