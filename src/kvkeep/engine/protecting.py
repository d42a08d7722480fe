"""Which entries of a layer keep full precision: the rules of ``protect``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvkeep.core.errors import CacheError
from kvkeep.core.policy import check_scores
from kvkeep.core.precision import WINDOW, Precision
from kvkeep.core.random import RandomStream
from kvkeep.core.view import protected_mask
from kvkeep.scoring.value_magnitude import value_magnitude
from kvkeep.scoring.window_attention import window_attention
from kvkeep.selection.top_k import top_k_mask

if TYPE_CHECKING:
    from kvkeep.engine.layer import RetentionLayer

# Policies draw under small numbers.
_PURPOSE = 1009


def mixed_precision(layer: RetentionLayer) -> Precision:
    """What the layer's cache was asked for.

    Raises
    ------
    CacheError
        If it keeps all entries in full precision.
    """
    if layer.cache.precision is None:
        raise CacheError(f"layer {layer.index} belongs to a cache that stores nothing in few bits.")
    return layer.cache.precision


def protection(
    layer: RetentionLayer, rows: Sequence[int], kept: Tensor, low: Tensor, scores: Tensor
) -> Tensor:
    """Entries that stay in full precision, or come back to it: bool, shape of ``kept``.

    Every head gets as many as ``precision.full_of`` its prompt, or all that it keeps: a prompt in full, sinks
    and newest entries, then the best of those that still have all their bits, then the best of the others.

    Parameters
    ----------
    rows
        Which rows of the layer the tensors speak of.
    kept, low
        bool ``[rows, kv_heads, entries]``: what stays at all, and what is in few bits so far.
    scores
        float32, same shape, of :func:`protection_scores`.
    """
    precision = mixed_precision(layer)
    positions = layer.stored.padded(rows, "positions")["positions"]
    lens = layer.cache.rows
    seq_lens, prompt_lens = (
        torch.tensor([each[row] for row in rows], device=kept.device)
        for each in (lens.seq_lens, lens.prompt_lens)
    )
    full_of = [precision.full_of(lens.prompt_lens[row]) for row in rows]
    protected = protected_mask(
        positions=positions,
        valid=kept,
        seq_lens=seq_lens,
        sinks=precision.sinks,
        recent=precision.recent or 0,
        prompt_lens=prompt_lens if precision.prompt == "full" else None,
    )
    full = kept.sum(-1).minimum(torch.tensor(full_of, device=kept.device)[:, None])
    for among in (kept & ~low, kept & low):
        candidates = among & ~protected
        wanted = (full - protected.sum(-1)).clamp(min=0).minimum(candidates.sum(-1))
        protected = protected | top_k_mask(scores, wanted, max(full_of), candidates)
    return protected


def protection_scores(layer: RetentionLayer, rows: Sequence[int]) -> Tensor:
    """How much an entry deserves full precision: float32 ``[rows, kv_heads, entries]``, larger = more.

    Read before an eviction: the rule ``policy`` ranks entries as the policy does.

    Source: range: VaSE (arXiv 2606.03928) suggests full precision for large value ranges, without a recipe;
    recent: the residual of KIVI (arXiv 2402.02750). The other rules are comparators of ours.
    """
    cache, store = layer.cache, layer.stored
    rule, everyone = mixed_precision(layer).protect, list(rows) == list(range(store.batch))
    chosen = None if everyone else rows
    if rule == "range":
        return value_magnitude(store.padded(chosen, "values")["values"])
    if rule == "policy":
        view = layer.view(rows)
        scores = cache.policy.score(view)
        check_scores(cache.policy.name, view, scores)
        return scores.float()
    positions = store.padded(chosen, "positions")["positions"].long()
    if rule == "random":
        ids = torch.tensor([cache.rows.sequence_ids[row] for row in rows], device=positions.device)
        stream = RandomStream.derive(
            seed=cache.seed, sequence_ids=ids, layer=layer.index, evictions=torch.zeros_like(ids)
        )
        # Drawn once for an entry: drawn anew, those that have kept their bits would die out.
        return stream.persistent.uniform(positions, purpose=_PURPOSE)
    if rule == "attention" and layer.recorder.ring is not None:
        queries, times = layer.recorder.ring.ordered()
        index = torch.tensor(list(rows), device=positions.device)
        return window_attention(
            queries.index_select(0, index)[:, :, -WINDOW:],
            times.index_select(0, index)[:, -WINDOW:],
            store.padded(chosen, "keys")["keys"],
            positions,
            store.valid(positions.shape[2], rows),
            causal=True,
        )
    return positions.float()
