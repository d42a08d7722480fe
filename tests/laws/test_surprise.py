"""Evictions that fall where the model is unsure: when, for whom, in how much memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvkeep
import kvkeep.testing
from kvkeep.core.errors import CacheError, ConfigError
from kvkeep.core.traits import Trigger
from kvkeep.engine.generation import cache_argument
from kvkeep.engine.surprise import entropy_of
from kvkeep.evaluation.decoding import decode
from kvkeep.evaluation.sampling import Sampler, Sampling
from kvkeep.testing.models import left_padded, tiny_model, tokens
from kvkeep.testing.watching import WatchedCache, feed
from tests.stores import kv_bytes

LAWS = ("oracle-llama", "short-prompts", "alone-as-in-a-batch", "nothing-leaks", "rebuilt-from-options")
CHECKS = {str(check): check for check in kvkeep.testing.checks() if str(check) in LAWS}


def naive(entropies: list[float], start: int, *, budget: int, buffer: int, threshold: float) -> list[int]:
    """Entries after each step: cut at the first surprise past half a buffer, or at two buffers."""
    stored, answer = start, []
    for entropy in entropies:
        stored += 1
        above = stored - budget
        if above > 0 and ((above >= buffer / 2 and entropy >= threshold) or above >= 2 * buffer):
            stored = budget
        answer.append(stored)
    return answer


def median_entropy() -> float:
    """In the middle of what the tiny model says, so that some tokens surprise and some do not."""
    model, ids = tiny_model("llama", dtype=torch.float64), tokens(1, 90)
    with torch.no_grad():
        return float(entropy_of(model(ids).logits[0]).median())


@pytest.mark.parametrize("threshold", [0.0, 0.5, 1e9])
@pytest.mark.parametrize("buffer", [1, 5, 8])
def test_the_rule(threshold: float, buffer: int) -> None:
    """Too early wastes memory that was paid for, too late needs memory that was not laid out."""
    entropies = torch.rand(300, generator=torch.Generator().manual_seed(buffer)).tolist()
    trigger, stored, run = Trigger(decode="surprise", threshold=threshold), 3, []
    for step, entropy in enumerate(entropies):
        stored += 1
        if trigger.due(stored=stored, seen=step, budget=20, buffer=buffer, entropy=entropy):
            stored = 20
        run.append(stored)
    assert run == naive(entropies, 3, budget=20, buffer=buffer, threshold=threshold)
    assert max(run) < 20 + 2 * buffer


@pytest.mark.parametrize("store", ["dense", "paged"])
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("text", ["snapkv", "vase-attnv + shared-layers"])
def test_conformance(text: str, check: str, store: Any) -> None:
    """Rows evict at steps of their own, in layers one by one or all together."""
    policy = kvkeep.policy(f"{text} + surprise(threshold={median_entropy()})", budget=24, buffer=8)
    CHECKS[check](policy, store=store)


def test_evictions_fall_on_surprises() -> None:
    """A note for the token before, or for another row, would evict anywhere."""
    threshold = median_entropy()
    policy = kvkeep.policy(f"snapkv + surprise(threshold={threshold})", budget=24, buffer=8)
    model = tiny_model("llama", dtype=torch.float64)
    ids, mask = left_padded((20, 9, 14))
    ids = torch.cat([ids, tokens(3, 120, seed=5)], 1)
    mask = torch.cat([mask, mask.new_ones(3, 120)], 1)
    cache = WatchedCache(model, policy)
    logits = feed(model, cache, ids, mask, [20, *[1] * 120])
    told = [entropy_of(each[:, -1]).tolist() for each in logits]
    for row, start in enumerate((20, 9, 14)):
        held = [len(forward[0][row][0]) for forward in cache.seen]  # while attending
        after = naive([step[row] for step in told[:-1]], start, budget=24, buffer=8, threshold=threshold)
        assert held == [start, *(before + 1 for before in [start, *after[:-1]])]
        assert len(set(held[40:])) > 4  # neither always at once nor always at the end


@pytest.mark.parametrize("store", ["dense", "paged"])
def test_bytes_are_those_of_budget_and_two_buffers(store: Any) -> None:
    """Law 3: memory is laid out once, for the longest wait, and for nothing more."""
    model = tiny_model("llama")
    for threshold in (0.0, 1e9):
        policy = kvkeep.policy(f"snapkv + surprise(threshold={threshold})", budget=24, buffer=8)
        cache = kvkeep.RetentionCache(model, policy, store=store, page_size=5)
        ids = tokens(2, 150)
        feed(model, cache, ids, torch.ones_like(ids), [30, *[1] * 120])
        per_entry = cache.spec.bytes_per_entry(4) // (cache.spec.kv_heads * 2)
        per_layer = [40] * 2 * cache.spec.kv_heads
        expected = kv_bytes(store, per_layer * 2, per_entry)
        assert cache.trace.kv_bytes == expected
        assert cache.trace.peak_entries == (40 if threshold else 31)
    resolved = kvkeep.RetentionCache(
        model,
        kvkeep.policy("snapkv + surprise", budget=kvkeep.Budget.from_bytes(expected), buffer=8),
        rows=2,
        context=200,
        store="dense",
    )
    assert resolved.policy.amount.count <= 24


def test_generate_and_eval_tell_the_cache() -> None:
    """The channel from sampler to cache: two loops of writing, the same evictions for the same text."""
    model = tiny_model("llama", dtype=torch.float64)
    policy = kvkeep.policy(f"snapkv + surprise(threshold={median_entropy()})", budget=24, buffer=8)
    ids, mask = left_padded((30, 12))
    output, cache = kvkeep.generate(
        model,
        policy,
        {"input_ids": ids, "attention_mask": mask},
        max_new_tokens=60,
        do_sample=False,
        eos_token_id=None,
    )
    other = kvkeep.RetentionCache(model, policy, trace_rows=True)
    done = decode(
        model,
        other,
        ids,
        mask,
        limits=[60, 60],
        end_tokens=frozenset(),
        sampler=Sampler(Sampling()),
    )
    written = {one.row: one.tokens for one in done}
    assert [written[row] for row in range(2)] == output[:, 30:].tolist()
    assert cache.trace.evictions == other.trace.evictions > 4
    for layer in range(2):
        for one, two in zip(cache.kept_positions(layer), other.kept_positions(layer), strict=True):
            assert all(torch.equal(*pair) for pair in zip(one, two, strict=True))


def test_beams_carry_what_was_noted() -> None:
    """Beams are reordered between the note and the token; the note must follow its beam."""
    model = tiny_model("llama", dtype=torch.float64)
    policy = kvkeep.policy(f"snapkv + surprise(threshold={median_entropy()})", budget=24, buffer=8)
    _, cache = kvkeep.generate(
        model, policy, {"input_ids": tokens(1, 30)}, max_new_tokens=40, num_beams=3, do_sample=False
    )
    assert cache.trace.evictions > 3
    cache.note_entropy([0.1, 0.2, 0.3])
    cache.reorder_cache(torch.tensor([2, 2, 0]))
    assert cache.rows.entropy == [0.3, 0.3, 0.1]


def test_who_does_not_tell_is_told() -> None:
    """A cache that waited for a note for ever would evict like another policy."""
    model, ids = tiny_model("llama"), tokens(1, 12)
    cache = kvkeep.RetentionCache(model, kvkeep.policy("snapkv + surprise", budget=24, buffer=8))
    with pytest.raises(CacheError, match="nobody said how unsure it was"):
        model.generate(ids, max_new_tokens=4, do_sample=False, **{cache_argument(model): cache})
    with pytest.raises(CacheError, match="2 entropies were noted for a cache of 1"):
        cache.note_entropy([0.1, 0.2])
    with pytest.raises(CacheError, match="not all numbers"):
        cache.note_entropy([float("nan")])
    with pytest.raises(ConfigError, match="an entropy is at least 0"):
        kvkeep.policy("snapkv + surprise(threshold=-1)", budget=24, buffer=8)
