"""Prompts: read at once or in chunks, evicted later, afterwards, or chunk by chunk."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import DynamicCache

import kvkeep
import kvkeep.calibration
from kvkeep.core.errors import BudgetError
from kvkeep.core.policy import Policy
from kvkeep.engine.generation import cache_argument
from kvkeep.testing.models import FAMILIES, left_padded, tiny_model, tokens
from kvkeep.testing.watching import WatchedCache, feed, pieces
from tests.stores import kv_bytes

pytestmark = pytest.mark.usefixtures("either_store")

ENTRY = (16 + 16) * 4  # key and value, float32

POLICIES: dict[str, Policy] = {
    "vase-attnv": kvkeep.VaSEAttnV(budget=24, buffer=8),
    "vase-dkv": kvkeep.VaSEDKV(budget=24, buffer=8),
    "h2o": kvkeep.H2O(budget=24, buffer=8),
    "expected-attention": kvkeep.ExpectedAttention(budget=24, buffer=8),
}


def kept(cache: kvkeep.RetentionCache) -> list[list[list[list[int]]]]:
    return [
        [[head.tolist() for head in row] for row in cache.kept_positions(layer)]
        for layer in cache.spec.managed
    ]


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen2.5-vl"])
def test_reading_in_chunks_equals_reading_at_once(family: str, policy: Policy) -> None:
    """A long prompt is read in chunks to save memory; the answer must not depend on it."""
    model = tiny_model(family, dtype=torch.float64)
    ids, mask = left_padded((6, 44, 30))
    ids = torch.cat([ids, tokens(3, 16, seed=1)], 1)
    mask = torch.cat([mask, torch.ones(3, 16, dtype=torch.int64)], 1)
    runs = []
    for chunk in (None, 10, 3):
        cache = kvkeep.RetentionCache(model, policy)
        logits = torch.cat(feed(model, cache, ids, mask, [*pieces(44, chunk), *[1] * 16]), 1)
        runs.append((logits[mask.bool()], kept(cache), cache.rows.prompt_lens))
        assert cache.trace.evictions >= 3
    for logits, positions, prompts in runs[1:]:
        assert (logits - runs[0][0]).abs().max() < 1e-9
        assert positions == runs[0][1]
        assert prompts == [6, 44, 30]


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_may_read_the_prompt_in_chunks(family: str) -> None:
    """`prefill_chunk_size` is how users of generate ask for it."""
    model = tiny_model(family, dtype=torch.float64)
    ids, mask = left_padded((20, 44, 7))
    inputs = {"input_ids": ids, "attention_mask": mask}
    options = {"max_new_tokens": 20, "do_sample": False}
    try:
        stock = DynamicCache(config=model.config.get_text_config(decoder=True))
        chunks = {"prefill_chunk_size": 10, "max_new_tokens": 1, cache_argument(model): stock}
        model.generate(**inputs, **chunks)
    except RuntimeError as error:
        pytest.skip(f"this release of transformers cannot read {family} prompts in chunks: {error}")
    once, first = kvkeep.generate(model, POLICIES["vase-attnv"], inputs, **options)
    chunked, second = kvkeep.generate(model, POLICIES["vase-attnv"], inputs, prefill_chunk_size=10, **options)
    assert torch.equal(once, chunked)
    assert kept(first) == kept(second)
    assert first.trace.evictions >= 3


@pytest.mark.parametrize("family", ["llama", "gpt-oss"])
def test_memory_stays_bounded_while_a_prompt_is_read_in_chunks(family: str, either_store: str) -> None:
    """A prompt of ten times the budget must not need ten times the memory, not even for a moment."""
    policy = dataclasses.replace(POLICIES["vase-dkv"], prefill="chunk")
    model, ids = tiny_model(family), tokens(2, 240)
    cache = kvkeep.RetentionCache(model, policy)
    stored = []
    for start in range(0, 240, 12):
        mask = torch.ones(2, start + 12, dtype=torch.int64)
        feed(model, cache, ids[:, : start + 12], mask, [12])
        stored.append(cache.managed_layers[0].stored.longest)
    trace = cache.trace
    assert stored[2:] == [24] * 18
    assert trace.peak_entries <= 24 + 12
    heads = 2 * 2 * len(trace.layers)  # rows, KV heads, layers
    assert trace.kv_bytes == kv_bytes(either_store, [24 + 8] * heads, ENTRY)
    assert trace.peak_kv_bytes <= kv_bytes(either_store, [24 + 12 + 8] * heads, ENTRY)


def test_afterwards_means_before_the_first_new_token(either_store: str) -> None:
    """The prompt is seen whole by its own tokens, and cut before the answer begins."""
    policy = dataclasses.replace(POLICIES["vase-dkv"], prefill="after")
    model = tiny_model()
    cache = WatchedCache(model, policy)
    ids, mask = tokens(1, 60), torch.ones(1, 60, dtype=torch.int64)
    feed(model, cache, ids, mask, [20, 20])
    assert [len(head) for head in cache.seen[1][1][0]] == [40, 40]
    assert cache.trace.evictions == 0
    feed(model, cache, ids, mask, [1])
    assert [len(head) for head in cache.seen[2][1][0]] == [25, 25]
    assert cache.trace.evictions == 1
    assert cache.trace.kv_bytes == kv_bytes(either_store, [24 + 8] * 2 * 2, ENTRY)


def test_deferring_leaves_the_prompt_to_the_decode_trigger() -> None:
    """VaSE's rule: n mod B == 0, so a prompt of 30 waits for the second new token."""
    model = tiny_model()
    cache = kvkeep.RetentionCache(model, POLICIES["vase-dkv"])
    ids, mask = tokens(1, 60), torch.ones(1, 60, dtype=torch.int64)
    stored = []
    for length in (30, 1, 1, 1):
        feed(model, cache, ids, mask, [length])
        stored.append(cache.managed_layers[0].stored.longest)
    assert stored == [30, 31, 24, 25]


@pytest.mark.parametrize("chunk", [None, 8])
@pytest.mark.parametrize("prefill", ["defer", "after", "chunk"])
def test_a_kept_prompt_stays_whole_on_top_of_the_budget(
    prefill: str, chunk: int | None, either_store: str
) -> None:
    """With prompt="kept" the question is never thinned out, however long it is."""
    budget = kvkeep.Budget(entries=16, prompt="kept")
    policy = kvkeep.RandomEviction(budget=budget, buffer=4, prefill=prefill)
    model = tiny_model()
    ids, mask = left_padded((11, 40))
    ids = torch.cat([ids, tokens(2, 40, seed=1)], 1)
    mask = torch.cat([mask, torch.ones(2, 40, dtype=torch.int64)], 1)
    cache = kvkeep.RetentionCache(model, policy)
    feed(model, cache, ids, mask, [*pieces(40, chunk), *[1] * 40])
    for layer in kept(cache):
        for row, prompt in zip(layer, (11, 40), strict=True):
            for head in row:
                assert head[:prompt] == list(range(prompt))
                assert prompt + 16 <= len(head) < prompt + 16 + 4
    heads = 2 * 2  # KV heads and layers
    most = [11 + 16 + 4] * heads + [40 + 16 + 4] * heads
    assert cache.trace.kv_bytes == kv_bytes(either_store, most, ENTRY)


def test_a_kept_prompt_is_the_first_one() -> None:
    """Documented as such: what a user says in a second turn competes, and the memory does not grow by it."""
    policy = kvkeep.RandomEviction(budget=kvkeep.Budget(entries=16, prompt="kept"), buffer=4)
    model, ids = tiny_model(), tokens(1, 90)
    cache = kvkeep.RetentionCache(model, policy)
    feed(model, cache, ids, torch.ones_like(ids), [20, *[1] * 10, 30, *[1] * 30])
    assert cache.rows.prompt_lens == [20]
    for layer in kept(cache):
        for head in layer[0]:
            assert head[:20] == list(range(20))
            assert len(head) < 20 + 16 + 4
            assert not set(range(30, 60)) <= set(head)  # the second prompt was thinned


@pytest.mark.parametrize(("tokens_read", "prompt"), [(40, 40), (41, 40), (42, 42)])
def test_a_rest_of_one_token_counts_as_generated(tokens_read: int, prompt: int) -> None:
    """The documented limit of plain generate: nothing that reaches a cache tells the two apart."""
    policy = kvkeep.RandomEviction(budget=kvkeep.Budget(entries=16, prompt="kept"), buffer=4)
    model, ids = tiny_model(), tokens(1, tokens_read)
    options = {"max_new_tokens": 6, "do_sample": False, "prefill_chunk_size": 10}
    cache = kvkeep.RetentionCache(model, policy)
    plain = model.generate(ids, **options, **{cache_argument(model): cache})
    assert plain.shape[1] == tokens_read + 6
    assert cache.rows.prompt_lens == [prompt]
    _, ours = kvkeep.generate(model, policy, {"input_ids": ids}, **options)
    assert ours.rows.prompt_lens == [tokens_read]


def test_a_protected_prompt_that_does_not_fit_is_refused() -> None:
    """Silently dropping the end of the question, as the reference code does, ruins every answer."""
    policy = kvkeep.TriAttention(budget=24, buffer=8)
    model = tiny_model()
    calibration = kvkeep.calibration.capture(model, tokens(64))
    cache = kvkeep.RetentionCache(model, policy, calibration=calibration)
    ids, mask = tokens(1, 60), torch.ones(1, 60, dtype=torch.int64)
    with pytest.raises(BudgetError, match=r"a prompt of 30 tokens is protected.*protect_prompt=False"):
        feed(model, cache, ids, mask, [30, *[1] * 8])
