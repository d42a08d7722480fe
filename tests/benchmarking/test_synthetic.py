"""Synthetic entries: right lengths, right scale, and a cache that decodes on as if it were real."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, StaticCache

import kvkeep
from kvkeep.benchmarking.models import random_prompt
from kvkeep.benchmarking.synthetic import (
    LayerScale,
    fill_retention,
    fill_stock,
    measure_scales,
    seeded,
    spread_positions,
)
from kvkeep.core.errors import ConfigError
from kvkeep.engine.generation import cache_argument


@pytest.mark.parametrize("policy", ["vase-attnv", "vase-dkv", "h2o", "streaming-llm"])
def test_a_bounded_cache_is_filled_to_its_budget(tiny: PreTrainedModel, policy: str) -> None:
    """A cache that held fewer entries than the budget would be measured too fast."""
    prompt = random_prompt(tiny, 3, 10, seed=0)
    cache = kvkeep.RetentionCache(tiny, kvkeep.policy(policy, budget=48, buffer=16))
    fill_retention(cache, tiny, prompt, context=500, seed=0)
    for layer in cache.managed_layers:
        assert layer.store.lens == [48] * 3
        assert layer.store.capacity == 48 + 16
    cache.check_integrity()
    assert cache.get_seq_length() == 500
    newest = cache.kept_positions(1)[2][1][-16:]
    assert newest.tolist() == list(range(484, 500))


def test_a_full_cache_is_filled_to_the_context(tiny: PreTrainedModel) -> None:
    """The baseline in our own store must read as much as the stock one."""
    cache = kvkeep.RetentionCache(tiny, kvkeep.Full(), context=320)
    fill_retention(cache, tiny, random_prompt(tiny, 2, 10, seed=0), context=300, seed=0)
    assert [layer.store.lens for layer in cache.managed_layers] == [[300, 300]] * 2
    assert torch.equal(cache.kept_positions(0)[0][0], torch.arange(300))


def test_a_filled_cache_evicts_once_per_period(tiny: PreTrainedModel) -> None:
    """Steps in whole periods must hold every eviction they pay for, or the share is wrong."""
    cache = kvkeep.RetentionCache(tiny, kvkeep.VaSEAttnV(budget=48, buffer=16))
    fill_retention(cache, tiny, random_prompt(tiny, 2, 20, seed=0), context=500, seed=0)
    with torch.no_grad():
        for _ in range(32):
            tiny(input_ids=torch.ones(2, 1, dtype=torch.long), **{cache_argument(tiny): cache})
    assert cache.trace.evictions == 2 * 2
    assert cache.trace.peak_entries == 48 + 16
    cache.check_integrity()


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_stock_caches_hold_the_context(tiny: PreTrainedModel, kind: str) -> None:
    """A baseline with a shorter context would make ours look slow, a longer one fast."""
    scales = measure_scales(tiny, random_prompt(tiny, 2, 32, seed=0))
    cache = (
        DynamicCache(config=tiny.config)
        if kind == "dynamic"
        else StaticCache(config=tiny.config, max_cache_len=130)
    )
    fill_stock(cache, scales, batch=2, context=100, seed=0)
    assert int(cache.get_seq_length()) == 100
    keys = cache.layers[1].keys
    assert keys.shape == (2, 2, 100 if kind == "dynamic" else 130, 8)
    assert bool((keys[:, :, :100].abs().sum(-1) > 0).all())


def test_draws_have_the_measured_mean_and_deviation() -> None:
    """Wrong scales change softmax and norms: a policy's tie-breaking or underflow paths would run."""
    generator = seeded(torch.device("cpu"), 0)
    keys = torch.randn(2, 3, 4000, 4, generator=generator) * torch.tensor([0.1, 1, 5, 20]) + 3
    scale = LayerScale.of(keys, 2 * keys)
    drawn_keys, drawn_values = scale.draw(2, 4000, generator)
    for real, drawn in ((keys, drawn_keys), (2 * keys, drawn_values)):
        torch.testing.assert_close(drawn.std((0, 2)), real.std((0, 2)), rtol=0.05, atol=0)
        torch.testing.assert_close(drawn.mean((0, 2)), real.mean((0, 2)), rtol=0.05, atol=0.6)


def test_spread_positions_ascend_without_repeats() -> None:
    """Two entries at one position cannot happen in a real cache; stores refuse them."""
    for first, end, count, recent in [(0, 10, 10, 4), (5, 1000, 100, 64), (7, 20, 5, 64), (3, 40, 37, 8)]:
        positions = spread_positions(first, end, count, recent=recent)
        assert len(positions) == count
        assert bool((positions.diff() > 0).all())
        assert int(positions[0]) >= first
        assert int(positions[-1]) == end - 1


def test_a_prompt_above_the_budget_is_refused(tiny: PreTrainedModel) -> None:
    """Otherwise the first timed step would carry the eviction of the prompt."""
    cache = kvkeep.RetentionCache(tiny, kvkeep.VaSEDKV(budget=48, buffer=16))
    with pytest.raises(ConfigError, match="a prompt of 60 tokens exceeds the 48 entries"):
        fill_retention(cache, tiny, random_prompt(tiny, 1, 60, seed=0), context=500, seed=0)
