"""trimkv and dbtrimkv on hand-made views: the formula, and what they reduce to (methods 6.9)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import kvkeep
from kvkeep.core.errors import BudgetError, ConfigError
from kvkeep.core.view import LayerView
from kvkeep.scoring.retention import log1mexp, retention
from kvkeep.testing.views import SHAPES, decide, kept, make_counts, make_view
from tests.reference import allocation, trim_kv
from tests.reference.heads import heads, keep_by_score


@pytest.mark.parametrize("ahead", [1, 2, 128])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_trimkv_is_the_reference(shape: dict[str, Any], ahead: int) -> None:
    """Score by score and choice by choice; padding has no score at all."""
    policy = kvkeep.TrimKV(budget=24, buffer=8, ahead=ahead)
    view = make_view(policy, **shape)
    scores, decision = policy.score(view), kept(decide(policy, view))
    assert scores.dtype == torch.float32
    for row in heads(view):
        for head in row:
            expected = trim_kv.score(head, ahead)
            ours = scores[head.row, head.number, : head.size].tolist()
            assert ours == pytest.approx(expected, rel=1e-4, abs=1e-4)
            assert decision[head.row][head.number] == keep_by_score(head, ours, 24)


@pytest.mark.parametrize("log_beta", [-1e-30, -1.5e-8, -1e-4, -0.3, -math.log(2), -5.0, -200.0])
@pytest.mark.parametrize("ahead", [2, 7, 512])
def test_looking_ahead_is_stable(log_beta: float, ahead: int) -> None:
    """An open gate has beta = 1 - 1.5e-8: naive logarithms of 1 - beta are infinite or wrong there."""
    positions = torch.tensor([[[0, 90, 99]]])
    ours = retention(torch.full((1, 1, 3), log_beta), positions, torch.tensor([100]), ahead=ahead)
    beta = torch.tensor(log_beta).item()  # as float32 holds it
    for answer, position in zip(ours[0, 0].tolist(), (0, 90, 99), strict=True):
        powers = math.fsum(math.exp(beta * m) for m in range(ahead))
        assert answer == pytest.approx((102 - position) * beta + math.log(powers), rel=2e-6, abs=2e-6)


def test_a_beta_of_one_scores_log_of_the_queries_ahead() -> None:
    """float32 gates can round to 1: the score must stay a number."""
    zero = torch.zeros(1, 1, 2)
    ours = retention(zero, torch.tensor([[[3, 9]]]), torch.tensor([10]), ahead=64)
    assert ours.tolist() == [[[pytest.approx(math.log(64), rel=1e-5)] * 2]]
    assert retention(zero, torch.tensor([[[3, 9]]]), torch.tensor([10])).tolist() == [[[0, 0]]]


def test_log1mexp_on_both_branches() -> None:
    """Compared with float64, from next to zero to far below."""
    x = -torch.logspace(-30, 2, 200, dtype=torch.float64)
    exact = torch.where(x > -0.5, (-torch.expm1(x)).log(), torch.log1p(-x.exp()))
    assert torch.allclose(log1mexp(x.float()).double(), exact, rtol=1e-5, atol=1e-7)


def layers(policy: kvkeep.TrimKV, count: int = 3, **options: Any) -> list[LayerView]:
    """Layers that differ in everything."""
    return [make_view(policy, layer=layer, seed=layer, **options) for layer in range(count)]


class TestReductions:
    """Law 6 and methods 6.9."""

    @pytest.mark.parametrize("ahead", [1, 16])
    def test_constant_beta_is_a_sliding_window(self, ahead: int) -> None:
        for kind in (kvkeep.TrimKV, kvkeep.DBTrimKV):
            policy = kind(budget=24, buffer=8, ahead=ahead)
            view = make_view(policy, lengths=(40, 33), log_retention=torch.full((2, 2, 40), -0.02))
            for row, size in enumerate((40, 33)):
                assert kept(decide(policy, view))[row] == [list(range(size - 24, size))] * 2

    def test_beta_of_one_ties_and_the_oldest_stay(self) -> None:
        policy = kvkeep.TrimKV(budget=24, buffer=8)
        view = make_view(policy, lengths=(40,), log_retention=torch.zeros(1, 2, 40))
        assert kept(decide(policy, view))[0] == [list(range(24))] * 2

    def test_one_layer_with_one_head(self) -> None:
        """H = L = 1: one budget for the model is a budget for the head."""
        ours, theirs = kvkeep.DBTrimKV(budget=24, buffer=8), kvkeep.TrimKV(budget=24, buffer=8)
        for shape in ({"lengths": (40,)}, {"lengths": (40, 26, 33), "evicted": 7}):
            view = make_view(ours, kv_heads=1, **shape)
            same = make_view(theirs, kv_heads=1, **shape)
            assert kept(decide(ours, view)) == kept(decide(theirs, same))

    def test_a_floor_of_the_budget_is_trimkv(self) -> None:
        ours, theirs = kvkeep.DBTrimKV(budget=24, buffer=8, floor=24), kvkeep.TrimKV(budget=24, buffer=8)
        views, same = layers(ours, lengths=(40, 33)), layers(theirs, lengths=(40, 33))
        counts = [make_counts(view) for view in views]
        for a, b in zip(ours.decide(views, counts), theirs.decide(same, counts), strict=True):
            assert kept(a) == kept(b)

    def test_uniform_behind_it_is_trimkv(self) -> None:
        ours, theirs = kvkeep.policy("dbtrimkv + uniform", budget=24), kvkeep.TrimKV(budget=24)
        views, same = layers(ours, lengths=(40, 33)), layers(theirs, lengths=(40, 33))
        counts = [make_counts(view) for view in views]
        for a, b in zip(ours.decide(views, counts), theirs.decide(same, counts), strict=True):
            assert kept(a) == kept(b)

    def test_whole_model_behind_trimkv_is_dbtrimkv(self) -> None:
        ours, theirs = kvkeep.DBTrimKV(budget=24), kvkeep.policy("trimkv + whole-model", budget=24)
        views, same = layers(ours, lengths=(40, 33)), layers(theirs, lengths=(40, 33))
        counts = [make_counts(view) for view in views]
        for a, b in zip(ours.decide(views, counts), theirs.decide(same, counts), strict=True):
            assert kept(a) == kept(b)


@pytest.mark.parametrize("floor", [0, 5])
def test_dbtrimkv_is_the_reference(floor: int) -> None:
    """The best of layers x heads x M entries of each row, and the floor by the published rule."""
    policy = kvkeep.DBTrimKV(budget=24, buffer=8, floor=floor)
    views = layers(policy, lengths=([40, 12], [33, 60]), evicted=9)
    decisions = policy.decide(views, [make_counts(view) for view in views])
    for view, decision in zip(views, decisions, strict=True):
        decision.check(valid=view.valid, protected=view.protected, counts=None)
    for row in range(2):
        all_heads = [
            allocation.Head(
                layer,
                24,
                policy.score(view)[row, head.number, : head.size].tolist(),
                head.positions,
                head.protected,
            )
            for layer, view in enumerate(views)
            for head in heads(view)[row]
        ]
        expected = allocation.plus(all_heads, floor)
        ours = [count for decision in decisions for count in decision.lengths[row].tolist()]
        assert ours == expected
        assert sum(ours) == min(6 * 24, sum(head.size for head in all_heads))


def test_a_head_may_become_empty_and_a_floor_prevents_it() -> None:
    """The published method has no floor: a head that forgets at once keeps nothing."""
    for floor in (0, 3):
        policy = kvkeep.DBTrimKV(budget=16, buffer=8, floor=floor)
        views = layers(policy, lengths=(40,))
        fast = torch.stack([torch.full((40,), -30.0), torch.full((40,), -1e-3)])[None]
        views[1] = make_view(policy, lengths=(40,), layer=1, log_retention=fast)
        decisions = policy.decide(views, [make_counts(view) for view in views])
        # The slow head is full, so what the floor adds to it goes to others: one entry to this one.
        assert decisions[1].lengths[0].tolist() == [floor + (floor > 0), 40]
        assert sum(int(decision.lengths.sum()) for decision in decisions) == 6 * 16


def test_a_threshold_bounds_retention_and_nothing_else() -> None:
    """Every entry with at least half of its retention left stays, no other one."""
    policy = kvkeep.DBTrimKV(budget=16, buffer=8, threshold=0.5)
    assert not policy.traits.exact_budget
    assert policy.traits.trigger.decode == "clock"
    views = layers(policy, lengths=(40, 35))
    for view, decision in zip(views, policy.decide(views, [make_counts(v) for v in views]), strict=True):
        left = policy.score(view).exp()
        wanted = [
            [row[0].nonzero()[:, 0].tolist(), row[1].nonzero()[:, 0].tolist()]
            for row in (left >= 0.5) & view.valid
        ]
        assert kept(decision) == wanted


def test_recent_entries_are_protected_by_mask() -> None:
    """Sliding window option: whatever the gate says of them."""
    policy = kvkeep.DBTrimKV(budget=16, buffer=8, recent=4)
    forgetting = torch.full((1, 2, 40), -1e-6)
    forgetting[..., -4:] = -50.0
    views = [make_view(policy, lengths=(40,), layer=layer, log_retention=forgetting) for layer in range(2)]
    for decision in policy.decide(views, [make_counts(view) for view in views]):
        for head in kept(decision)[0]:
            assert set(range(36, 40)) <= set(head)


def test_settings() -> None:
    """Defaults of the methods page, and what cannot be."""
    policy = kvkeep.DBTrimKV(budget=512)
    assert (policy.recent, policy.ahead, policy.floor, policy.threshold) == (0, 1, 0, None)
    assert (policy.trigger, policy.prefill, policy.sinks) == ("slack", "after", 0)
    assert policy.traits.log_retention
    assert policy.traits.trained
    assert (policy.traits.scope, kvkeep.TrimKV(budget=512).traits.scope) == ("model", "layer")
    assert (policy.traits.ragged, kvkeep.TrimKV(budget=512).traits.ragged) == (True, False)
    for options, problem in (
        ({"ahead": 0}, "ahead 0 is below 1 query"),
        ({"recent": -1}, "recent -1 is negative"),
        ({"threshold": 1.5}, r"threshold 1.5 is outside \(0, 1\)"),
        ({"threshold": 0.5, "floor": 2}, "a threshold decides alone: leave floor out"),
        ({"floor": 600}, "a floor of 600 entries per head is above the budget of 512"),
    ):
        with pytest.raises(ConfigError, match=problem):
            kvkeep.DBTrimKV(budget=512, **options)
    with pytest.raises(BudgetError):
        kvkeep.TrimKV(budget=16, recent=16)
