"""The closed form of the mean cache, against a fake trace and a real cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvkeep
from kvkeep.core.errors import ConfigError
from kvkeep.engine.generation import cache_argument
from kvkeep.evaluation.expected_cache import budget_for, expected_cache, expected_mean
from tests.evaluation.models import tiny_model


def trace(policy: kvkeep.RandomEviction, prompt: int, steps: int) -> tuple[list[int], int]:
    """Entries while each step attends, and evictions: one step at a time, by the policy's own trigger."""
    trigger = policy.traits.trigger
    limit = policy.amount.count + (prompt if policy.amount.prompt == "kept" else 0)
    stored = prompt if trigger.prefill == "defer" else min(prompt, limit)
    held, evictions = [], 0
    for step in range(1, steps + 1):
        stored += 1
        held.append(stored)
        if trigger.due(stored=stored, seen=prompt + step, budget=limit, buffer=policy.buffer):
            stored, evictions = limit, evictions + 1
    return held, evictions


@given(
    budget=st.integers(9, 40),
    buffer=st.integers(1, 8),
    prompt=st.integers(1, 70),
    steps=st.integers(0, 90),
    trigger=st.sampled_from(["periodic", "slack", "clock", "never"]),
    prefill=st.sampled_from(["defer", "after", "chunk"]),
    mode=st.sampled_from(["counts", "kept"]),
)
def test_closed_form_equals_the_trace(
    budget: int, buffer: int, prompt: int, steps: int, trigger: Any, prefill: Any, mode: Any
) -> None:
    """A plan that promised another memory than the run takes would match the wrong budgets."""
    policy = kvkeep.RandomEviction(
        budget=kvkeep.Budget(entries=budget, prompt=mode), buffer=buffer, trigger=trigger, prefill=prefill
    )
    expected = expected_cache(policy, prompt=prompt, steps=steps)
    held, evictions = trace(policy, prompt, steps)
    assert expected.evictions == evictions
    if held:
        assert expected.mean_cache == sum(held) / steps
        assert expected.peak_cache == max(held)


def test_steady_state_is_budget_plus_half_a_buffer() -> None:
    """The formula that papers and users have in mind: C + (B + 1) / 2."""
    policy = kvkeep.RandomEviction(budget=64, buffer=16)
    after_ramp = expected_cache(policy, prompt=64, steps=16 * 50)
    assert after_ramp.mean_cache == 64 + 17 / 2
    assert after_ramp.peak_cache == 80
    full = expected_cache(kvkeep.Full(), prompt=10, steps=4)
    assert (full.mean_cache, full.peak_cache, full.prefill_cache, full.evictions) == (12.5, 14, 10.0, 0)
    assert expected_cache(policy, prompt=7, steps=0).mean_cache == 7.0
    with pytest.raises(ConfigError, match="steps -1"):
        expected_cache(policy, prompt=5, steps=-1)


@pytest.mark.parametrize(
    ("policy", "prompt"),
    [
        (kvkeep.RandomEviction(budget=12, buffer=4), 9),
        (kvkeep.RandomEviction(budget=12, buffer=4, prefill="after"), 21),
        (kvkeep.RandomEviction(budget=12, buffer=4, trigger="clock"), 21),
        (kvkeep.RandomEviction(budget=kvkeep.Budget(entries=12, prompt="kept"), buffer=4), 9),
        (kvkeep.Full(), 9),
    ],
)
def test_a_real_cache_measures_the_closed_form(policy: Any, prompt: int) -> None:
    """If engine and formula drifted apart, budgets would be planned for a cache that does not exist."""
    model, steps = tiny_model(), 33
    cache = kvkeep.RetentionCache(model, policy, trace_rows=True)
    ids = torch.randint(2, 32, (1, prompt), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for step in range(steps + 1):
            model(
                input_ids=ids if step == 0 else ids[:, :1], use_cache=True, **{cache_argument(model): cache}
            )
    measured, expected = cache.row_traces[0], expected_cache(policy, prompt=prompt, steps=steps)
    assert measured.steps == steps
    assert measured.mean_entries == expected.mean_cache
    assert measured.peak_entries == expected.peak_cache
    assert measured.prefill_entries == expected.prefill_cache


def test_a_run_weights_its_steps_and_a_budget_can_be_solved_for() -> None:
    """Long answers hold memory longer; the first guess of a match must know that."""
    policy, lengths = kvkeep.RandomEviction(budget=32, buffer=8), [(10, 200), (10, 20), (10, 0)]
    one, two = (expected_cache(policy, prompt=10, steps=steps) for steps in (200, 20))
    mean = expected_mean(policy, lengths)
    assert mean == pytest.approx((200 * one.mean_cache + 20 * two.mean_cache) / 220)
    assert expected_mean(policy, [(10, 0)]) == 0.0
    assert budget_for(policy, lengths, mean, low=9, high=500) == 32
    assert budget_for(policy, lengths, 10_000.0, low=9, high=500) == 500
    assert budget_for(policy, lengths, 1.0, low=9, high=500) == 9


def test_a_budget_is_solved_for_in_the_policys_own_way_with_prompts() -> None:
    """Reckoned without the prompt that stays, a match through an engine began at four times the answer."""
    kept = kvkeep.RandomEviction(budget=kvkeep.Budget(entries=32, prompt="kept"), buffer=8)
    lengths = [(100, 200), (90, 150)]
    mean = expected_mean(kept, lengths)
    assert mean > 90
    assert budget_for(kept, lengths, mean, low=9, high=500) == 32
