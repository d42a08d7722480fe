"""Watching evictions: what an observer is shown is what happens, and it changes nothing."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch

import kvkeep
from kvkeep.engine.eviction import Eviction
from kvkeep.engine.generation import cache_argument
from tests.evaluation.models import tiny_model

STEPS = 30


def held(cache: kvkeep.RetentionCache) -> dict[tuple[int, int, int], set[int]]:
    """Positions by sequence id, layer and head."""
    return {
        (name, layer, head): set(positions.tolist())
        for layer in cache.spec.managed
        for name, heads in zip(cache.rows.sequence_ids, cache.kept_positions(layer), strict=True)
        for head, positions in enumerate(heads)
    }


@pytest.mark.parametrize(
    ("policy", "store"),
    [
        *((name, store) for name in ("random", "vase-attnv") for store in ("dense", "paged")),
        ("snapkv + whole-model", "paged"),
        ("h2o + adaptive-heads", "paged"),
    ],
)
def test_what_is_shown_is_what_goes(policy: str, store: str) -> None:
    """Held before, plus the new token, minus what was shown, is held after: at every step, in each head."""
    model, gone = tiny_model(), defaultdict(set)

    def watch(eviction: Eviction) -> None:
        view, evicted = eviction.view, eviction.evicted
        assert not bool((evicted & view.protected).any())
        assert torch.equal(evicted | eviction.kept, view.valid)
        for row, name in enumerate(eviction.sequence_ids):
            for head, which in enumerate(evicted[row]):
                gone[name, view.layer, head] |= set(view.positions[row, head, which].tolist())

    made = kvkeep.policy(policy, budget=12, buffer=4)
    caches = [
        kvkeep.RetentionCache(model, made, sequence_ids=[7, 9], store=store, on_eviction=observer)
        for observer in (watch, None)
    ]
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[1, :5] = 0
    ids = torch.randint(2, 32, mask.shape, generator=torch.Generator().manual_seed(0))
    for step in range(STEPS + 1):
        before, lens = (held(caches[0]), list(caches[0].rows.seq_lens)) if step else ({}, [0, 0])
        gone.clear()
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        logits = []
        for cache in caches:
            with torch.no_grad():
                options = {cache_argument(model): cache, "attention_mask": mask, "position_ids": positions}
                logits.append(model(input_ids=ids, use_cache=True, **options).logits)
        assert torch.equal(*logits)
        for key, now in held(caches[0]).items():
            row = (7, 9).index(key[0])
            new = set(range(lens[row], caches[0].rows.seq_lens[row]))
            assert now == (before.get(key, set()) | new) - gone[key]
        ids = logits[0][:, -1:].argmax(-1) % 30 + 2
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=-1)
    assert caches[0].trace.evictions > 4
    assert caches[0].trace.evictions == caches[1].trace.evictions


def test_a_cache_that_is_emptied_is_still_watched() -> None:
    """reset() makes a new evictor; names follow the rows that stay."""
    model, names = tiny_model(), []
    cache = kvkeep.RetentionCache(
        model,
        kvkeep.RandomEviction(budget=6, buffer=2, prefill="chunk"),
        sequence_ids=[3, 5],
        on_eviction=lambda eviction: names.append(eviction.sequence_ids),
    )
    options = {cache_argument(model): cache}
    for _ in range(2):
        with torch.no_grad():
            model(input_ids=torch.randint(2, 32, (2, 12)), use_cache=True, **options)
        cache.reset()
    assert names == [(3, 5)] * 2 * len(cache.managed_layers)
    with torch.no_grad():
        model(input_ids=torch.randint(2, 32, (2, 12)), use_cache=True, **options)
        cache.batch_select_indices(torch.tensor([1]))
        names.clear()
        for _ in range(2):
            model(input_ids=torch.tensor([[4]]), use_cache=True, **options)
    assert set(names) == {(5,)}
