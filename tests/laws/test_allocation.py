"""Policies with an allocation behind them, on the paged store: the laws hold for heads of any length."""

from __future__ import annotations

import pytest
import torch

import kvkeep
import kvkeep.testing
from kvkeep.testing.models import tiny_model, tokens
from kvkeep.testing.oracle import oracle_gap
from kvkeep.testing.watching import feed

TEXTS = [
    "snapkv + whole-model(floor=10)",
    "vase-attnv + adaptive-heads",
    "h2o(recent_window=4) + adaptive-heads(floor=0.2)",
    "keydiff + sample + pyramid(beta=3)",
    "snapkv + threshold(at=0.3, calibrate=z-score)",
]
CHECKS = {
    str(check): check
    for check in kvkeep.testing.checks()
    if str(check)
    in (
        "rebuilt-from-options",
        "decisions-are-sound",
        "protection-survives-ties",
        "empty-slots-do-not-count",
        "oracle-llama",
        "alone-as-in-a-batch",
        "nothing-to-evict-nothing-changed",
        "nothing-leaks",
    )
}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("text", TEXTS)
def test_conformance(text: str, check: str) -> None:
    """Those checks that an allocation can break; the others are its base's."""
    CHECKS[check](kvkeep.policy(text, budget=24, buffer=8))


def test_prompts_read_in_chunks() -> None:
    """Evictions in the middle of a prompt leave ragged heads behind; the next chunk must see just them."""
    policy = kvkeep.policy("snapkv(prefill=chunk) + whole-model", budget=24, buffer=8)
    model = tiny_model("llama", dtype=torch.float64)
    gap = oracle_gap(model, policy, prompts=(48, 3, 31), new=20, chunk=7, page_size=5)
    assert gap.largest < 1e-9
    assert gap.evictions > 8


def test_heads_really_differ_and_the_total_is_the_budget() -> None:
    """An allocation that gave every head the same would pass all laws above."""
    policy = kvkeep.policy("snapkv + whole-model", budget=24, buffer=8)
    model, ids = tiny_model("llama"), tokens(2, 40)
    cache = kvkeep.RetentionCache(model, policy)
    feed(model, cache, ids, torch.ones_like(ids), [32, *[1] * 8])
    held = torch.tensor([[len(h) for row in cache.kept_positions(i) for h in row] for i in range(2)])
    assert len(set(held.flatten().tolist())) > 2
    assert held.view(2, 2, 2).sum((0, 2)).tolist() == [96, 96]


def test_thresholds_leave_less_than_the_budget_and_never_more() -> None:
    """A threshold that nothing fails, or a bound that does not bind, would pass all laws above."""
    policy = kvkeep.policy("snapkv + threshold(at=0.3, calibrate=z-score)", budget=24, buffer=8)
    model, ids = tiny_model("llama"), tokens(2, 40)
    cache = kvkeep.RetentionCache(model, policy)
    feed(model, cache, ids, torch.ones_like(ids), [32, *[1] * 8])
    held = [len(h) for i in range(2) for row in cache.kept_positions(i) for h in row]
    assert len(set(held)) > 2
    assert 8 <= min(held) < max(held) <= 24
    cache.check_integrity()
