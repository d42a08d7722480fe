"""Allocation put behind any policy: `+ uniform`, `+ pyramid`, `+ adaptive-heads`, `+ threshold` and so on."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvkeep
from kvkeep.core.decision import KeepCounts, KeepDecision
from kvkeep.core.errors import BudgetError, ConfigError, UnknownNameError
from kvkeep.core.policy import Policy
from kvkeep.core.view import LayerView
from kvkeep.evaluation.identity import plain
from kvkeep.policies.allocated import Allocated
from kvkeep.testing.views import kept, make_counts, make_view, row_of
from tests.unit.test_every_policy import TEXTS

SHARES = [
    "uniform",
    "pyramid",
    "adaptive-heads",
    "adaptive-heads(safe=0.5, calibrate=softmax)",
    "adaptive-heads(floor=0.2, calibrate=z-score)",
    "whole-model",
    "whole-model(calibrate=rank, floor=12)",
    "whole-model(calibrate=softmax, threshold=0.03)",
    "threshold(at=0.03, calibrate=softmax)",
]
BASES = ["snapkv", "vase-attnv", "r-kv", "keydiff + sample", "streaming-llm", "vase-dkv + reserve(slots=9)"]
# Heads of any length, as a ragged store holds them.
RAGGED: list[Any] = [([40, 33, 26], [31, 60, 29]), ([24, 24, 24], [9, 40, 11])]


def layers(policy: Policy, lengths: Any, **options: Any) -> list[LayerView]:
    """Three layers that differ."""
    return [
        make_view(policy, lengths=lengths, kv_heads=3, layer=layer, seed=layer, evicted=7, **options)
        for layer in range(3)
    ]


def checked(policy: Policy, views: list[LayerView], counts: list[KeepCounts]) -> list[KeepDecision]:
    """Decide as the engine would, and check what every store relies on."""
    decisions = policy.decide(views, counts)
    for view, decision in zip(views, decisions, strict=True):
        decision.check(valid=view.valid, protected=view.protected, counts=None)
    return decisions


@pytest.mark.parametrize("share", SHARES[1:])
@pytest.mark.parametrize("base", BASES)
def test_sound_on_ragged_heads_and_alone_as_in_a_batch(base: str, share: str) -> None:
    """The total is kept, protection too, and a sequence's counts depend on it alone."""
    policy = kvkeep.policy(f"{base} + {share}", budget=24, buffer=8, sinks=2)
    assert policy.traits.ragged
    views = layers(policy, RAGGED[0])
    counts = [make_counts(view) for view in views]
    decisions = checked(policy, views, counts)
    if policy.traits.exact_budget:
        assert sum(decision.lengths.sum(-1) for decision in decisions).tolist() == [216, 216]
    together = [kept(decision) for decision in decisions]
    for row in range(2):
        alone = [make_view(policy, **row_of(view, row)) for view in views]
        for place, decision in enumerate(checked(policy, alone, [make_counts(view) for view in alone])):
            assert kept(decision)[0] == together[place][row]


@pytest.mark.parametrize("share", [share for share in SHARES[1:] if "threshold" not in share])
def test_too_few_entries_keep_all(share: str) -> None:
    """A row below its total loses nothing, and a short head leaves its share to others."""
    policy = kvkeep.policy(f"snapkv + {share}", budget=24, buffer=8)
    views = layers(policy, RAGGED[1])
    decisions = checked(policy, views, [make_counts(view) for view in views])
    total = sum(decision.lengths.sum(-1) for decision in decisions)
    assert total.tolist() == [216, 3 * 60]


@pytest.mark.parametrize("text", TEXTS)
@given(seed=st.integers(0, 1 << 20))
@settings(max_examples=12, deadline=None)
def test_every_selection_takes_counts_that_differ(text: str, seed: int) -> None:
    """Whatever an allocation asks of a head between its protected entries and all it holds, it gets."""
    policy = kvkeep.policy(text, budget=24, buffer=8)
    alike = getattr(policy, "one_set", False)  # its heads hold the same tokens, always
    lengths: Any = (40, 33) if alike else ([40, 25], [33, 40])
    view = make_view(policy, lengths=lengths, group=2, evicted=0 if alike else 5, seed=seed)
    least, most = view.protected.sum(-1), view.valid.sum(-1)
    noise = torch.rand(least.shape, generator=torch.Generator().manual_seed(seed))
    per_head = least + (noise * (most - least + 1)).long()
    if alike:
        per_head = per_head.amin(1, keepdim=True).expand_as(per_head)
    counts = KeepCounts(per_head, int(per_head.max()))
    decision = policy.select(view, policy.score(view), counts)
    decision.check(valid=view.valid, protected=view.protected, counts=counts)


@pytest.mark.parametrize("text", [text for text in TEXTS if "dbtrimkv" not in text])
def test_uniform_changes_nothing(text: str) -> None:
    """Law 6: the ragged store with equal shares must give the numbers of the dense one."""
    plain_policy = kvkeep.policy(text, budget=24, buffer=8)
    shared = kvkeep.policy(f"{text} + uniform", budget=24, buffer=8)
    assert shared.traits.scope == plain_policy.traits.scope
    view, same = (make_view(each, lengths=(40, 31), group=3) for each in (plain_policy, shared))
    counts = make_counts(view)
    ours, theirs = shared.decide([same], [counts])[0], plain_policy.decide([view], [counts])[0]
    assert torch.equal(ours.indices, theirs.indices)
    assert torch.equal(ours.lengths, theirs.lengths)
    scores = shared.score_all([same])
    assert torch.equal(shared.allocate([same], scores, [counts])[0].per_head, counts.per_head)


def test_one_layer_with_one_head_is_uniform() -> None:
    """Law 6: with nobody to share with, each way is the base policy."""
    for base in BASES:
        policy = kvkeep.policy(base, budget=24, buffer=8)
        view = make_view(policy, lengths=(40,), kv_heads=1)
        theirs = policy.decide([view], [make_counts(view)])[0]
        for share in (share for share in SHARES if "threshold" not in share):
            shared = kvkeep.policy(f"{base} + {share}", budget=24, buffer=8)
            same = make_view(shared, lengths=(40,), kv_heads=1)
            assert kept(shared.decide([same], [make_counts(same)])[0]) == kept(theirs), share


def test_the_reserve_of_vase_follows_the_head() -> None:
    """N_v = 6, 4 of them sinks: 2 beside the sinks where 12 slots are free, 5 where 30 are."""
    policy = kvkeep.VaSEAttnV(budget=24, buffer=8, sample=False)
    view = make_view(policy, lengths=(60,), kv_heads=3)
    counts = KeepCounts(torch.tensor([[24, 42, 13]]), 42)  # free: 12, 30, 1
    chosen = kept(policy.select(view, torch.zeros(view.shape), counts))[0]
    ranges = (view.values.amax(-1) - view.values.amin(-1)).masked_fill(~view.candidates, -1)[0]
    for head, slots in enumerate((2, 5, 0)):
        largest = set(ranges[head].topk(slots).indices.tolist())
        # All scores tie, so the rest are the oldest: what is reserved is what stands out of them.
        rest = [i for i in range(4, 52) if i not in largest][: len(chosen[head]) - 12 - slots]
        assert chosen[head] == sorted({0, 1, 2, 3, *largest, *rest, *range(52, 60)})


def test_a_large_score_wins_slots_from_other_layers() -> None:
    """What whole-model is for: one head that needs more gets it, from all layers."""
    policy = kvkeep.policy("key-norm + whole-model(floor=6)", budget=16, buffer=4)
    views = layers(policy, (40,))
    views[1] = make_view(policy, lengths=(40,), kv_heads=3, layer=1, keys=views[1].keys * 1e-3)
    lengths = [each.lengths[0] for each in checked(policy, views, [make_counts(view) for view in views])]
    assert int(lengths[1].min()) > 24  # short keys score high there
    assert [int(each.min()) for each in (lengths[0], lengths[2])] == [6, 6]
    assert int(sum(each.sum() for each in lengths)) == 9 * 16


@pytest.mark.parametrize("base", BASES)
def test_thresholds_that_all_or_none_pass(base: str) -> None:
    """Law 6: what passes always is the base policy, what never does is what it protects."""
    plain_policy = kvkeep.policy(base, budget=24, buffer=8, sinks=2)
    view = make_view(plain_policy, lengths=RAGGED[0], kv_heads=3)
    theirs = plain_policy.decide([view], [make_counts(view)])[0]
    for at, expected in ((-1e30, kept(theirs)), (1e30, None)):
        policy = kvkeep.policy(f"{base} + threshold(at={at})", budget=24, buffer=8, sinks=2)
        same = make_view(policy, lengths=RAGGED[0], kv_heads=3)
        (decision,) = checked(policy, [same], [make_counts(same)])
        if expected is None:
            assert torch.equal(decision.mask(same.shape[2]), same.protected)
        else:
            assert kept(decision) == expected


def test_a_threshold_keeps_what_passes_and_no_more_than_the_budget() -> None:
    """Heads that need little give it back, not to each other; the best of many that pass stay."""
    policy = kvkeep.policy("key-norm + threshold(at=-3)", budget=24, buffer=8)
    view = make_view(policy, lengths=(40,), kv_heads=3)
    lengths = view.keys.float().norm(dim=-1)[0]
    scale = torch.tensor([0.01, 1.0, 100.0])[:, None]  # all, some and none are shorter than 3
    view = make_view(
        policy, lengths=(40,), kv_heads=3, keys=view.keys * 3 / lengths.median() * scale[..., None]
    )
    (decision,) = checked(policy, [view], [make_counts(view)])
    norms = view.keys.float().norm(dim=-1)[0].masked_fill(view.protected[0], float("inf"))
    for head, found in enumerate(kept(decision)[0]):
        passing = [entry for entry in norms[head].argsort().tolist() if norms[head, entry] <= 3]
        assert found == sorted([*passing[:16], *range(32, 40)])
    assert [int(each) for each in decision.lengths[0]][::2] == [24, 8]
    assert 8 < int(decision.lengths[0, 1]) <= 24


class TestText:
    """Spelling, options, and what cannot be."""

    def test_parts_in_any_order(self) -> None:
        first = kvkeep.policy("snapkv + adaptive-heads(floor=0.2) + sample + reserve", budget=512)
        assert first == kvkeep.policy("snapkv + sample + reserve + adaptive-heads(floor=0.2)", budget=512)
        assert first.name == "snapkv + sample + reserve + adaptive-heads(floor=0.2)"
        assert isinstance(first, Allocated)
        assert isinstance(first.base, kvkeep.Composed)

    @pytest.mark.parametrize(
        ("share", "scope"),
        [
            ("uniform", "layer"),
            ("pyramid", "model"),
            ("adaptive-heads", "layer"),
            ("whole-model", "model"),
            ("threshold(at=0.1)", "layer"),
        ],
    )
    def test_scope(self, share: str, scope: str) -> None:
        assert kvkeep.policy(f"snapkv + {share}", budget=512).traits.scope == scope

    def test_triattention_decides_layer_by_layer(self) -> None:
        """Its other modes give all layers one score: layers must hold the same tokens for that."""
        shared = kvkeep.policy("triattention + adaptive-heads", budget=512)
        assert shared.traits.scope == "layer"
        assert kvkeep.policy("triattention + uniform", budget=512).traits.scope == "model"

    def test_options_survive(self) -> None:
        """Run logs hold them; without a way back a run cannot be repeated."""
        policy = kvkeep.policy("vase-attnv + whole-model(calibrate=rank, floor=4)", budget=512)
        assert type(policy)(**policy.options()) == policy
        written = json.loads(json.dumps(plain(policy)))
        assert (written["share"], written["calibrate"], written["floor"]) == ("whole-model", "rank", 4)
        assert written["base"]["name"] == "vase-attnv"
        assert policy.with_budget(256).amount.count == 256

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("tova + adaptive-heads", "all heads of a layer keep one set of entries under tova"),
            ("tova + sample + whole-model", "take '+ pyramid', or another policy"),
            ("tova + threshold(at=0.1)", "take '+ pyramid', or another policy"),
            ("snapkv + threshold", "threshold needs the score that keeps an entry: '+ threshold(at=0.001)'"),
            ("snapkv + threshold(at=high)", "at 'high' is not a finite number"),
            ("full + whole-model", "full keeps everything, so there is nothing to share out"),
            ("snapkv + pyramid(beta=1)", "beta 1 is not above 1"),
            ("snapkv + adaptive-heads(safe=2)", "safe 2 is outside [0, 1]"),
            (
                "snapkv + adaptive-heads(safe=0.1, floor=0.1)",
                "safe and floor are two forms: give one of them",
            ),
            ("snapkv + whole-model(floor=0.5)", "floor 0.5 is not a whole number of entries"),
            ("snapkv + whole-model(floor=2, threshold=1)", "a threshold decides alone: leave floor out"),
            ("snapkv + whole-model(calibrate=loud)", "calibrate 'loud' is none of"),
            ("snapkv + pyramid + whole-model", "shares the budget out twice, by pyramid and whole-model"),
        ],
    )
    def test_mistakes(self, text: str, problem: str) -> None:
        with pytest.raises(ConfigError) as error:
            kvkeep.policy(text, budget=512)
        assert problem in str(error.value)

    def test_a_floor_above_the_budget(self) -> None:
        with pytest.raises(ConfigError, match="a floor of 600 entries per head is above the budget of 512"):
            kvkeep.policy("snapkv + whole-model(floor=600)", budget=512)
        with pytest.raises(BudgetError):
            kvkeep.policy("snapkv + whole-model", budget=32)

    def test_an_option_of_another_part(self) -> None:
        with pytest.raises(UnknownNameError, match="unknown option of adaptive-heads 'threshold'"):
            kvkeep.policy("snapkv + adaptive-heads(threshold=3)", budget=512)
        with pytest.raises(ConfigError, match="pyramid has no option floor"):
            Allocated(base=kvkeep.SnapKV(budget=512), share="pyramid", floor=3)

    def test_tova_may_be_a_pyramid(self) -> None:
        """Layers differ, heads of a layer do not: one set stays one set."""
        policy = kvkeep.policy("tova + pyramid(beta=4)", budget=24, buffer=8)
        views = layers(policy, (40, 40))
        decisions = checked(policy, views, [make_counts(view) for view in views])
        assert decisions[0].lengths[0, 0] > decisions[2].lengths[0, 0]
        for decision in decisions:
            assert bool((decision.lengths == decision.lengths[:, :1]).all())
