"""What a policy gets to see of a layer: the rows that evict, and what its traits ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

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
    entries = max(store.lens[row] for row in rows)
    device = store.keys.device
    index = torch.tensor(list(rows), device=device)

    def take(tensor: Tensor) -> Tensor:
        return tensor if everyone else tensor.index_select(0, index)

    seq_lens = torch.tensor([cache.rows.seq_lens[row] for row in rows], device=device)
    prompt_lens = torch.tensor([cache.rows.prompt_lens[row] for row in rows], device=device)
    positions = take(store.positions[:, :, :entries]).long()
    valid = store.valid(entries, rows)
    recorded: dict[str, Any] = {}
    if traits.queries and layer.ring is not None:
        queries, times = layer.ring.ordered()
        recorded |= {"queries": take(queries), "query_positions": take(times)}
    if traits.attention_sum:
        recorded["attention_sum"] = take(store.extras["attention_sum"][:, :, :entries])
    if traits.query_moments and layer.sums is not None:
        moments = layer.sums.moments()
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
    return LayerView(
        layer=layer.index,
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
        recent_kept=policy.recent,
    )
