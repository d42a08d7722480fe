"""Parts that change the score, and layers that share a selection, against plain loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvkeep
from kvkeep.core.errors import ConfigError
from kvkeep.core.policy import Policy
from kvkeep.core.view import LayerView
from kvkeep.policies.shared_layers import SharedLayers
from kvkeep.testing.models import tiny_model, tokens
from kvkeep.testing.views import decide, kept, make_counts, make_view
from kvkeep.testing.watching import feed
from tests.reference import reweigh

BASES = ["snapkv", "keydiff", "h2o", "key-norm"]
SHAPES: list[dict[str, Any]] = [
    {"lengths": (40,), "group": 3},
    {"lengths": (25, 40, 31), "kv_heads": 3, "evicted": 5},
]


def each_head(view: LayerView, scores: torch.Tensor) -> Any:
    """Row, head, scores, ages, what competes, what is protected: of every head."""
    for row in range(view.shape[0]):
        for head in range(view.shape[1]):
            n = int(view.valid[row, head].sum())
            ages = (view.seq_lens[row] - 1 - view.positions[row, head, :n]).tolist()
            among = view.candidates[row, head, :n].tolist()
            safe = view.protected[row, head, :n].nonzero()[:, 0].tolist()
            yield row, head, scores[row, head, :n].double().tolist(), ages, among, safe


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("base", BASES)
def test_norm_weighted_is_the_share_times_the_length(base: str, shape: dict[str, Any]) -> None:
    """A weight by the wrong mean, or on the wrong scale, would rank other entries."""
    policy = kvkeep.policy(f"{base} + norm-weighted", budget=24, buffer=8)
    view = make_view(policy, **shape)
    chosen = kept(decide(policy, view))
    changed = 0
    for row, head, scores, _, among, safe in each_head(
        view, kvkeep.policy(base, budget=24, buffer=8).score(view)
    ):
        values = view.values[row, head].double().tolist()[: len(scores)]
        ours = reweigh.norm_weighted(scores, values, among, mass=policy.mass)
        assert chosen[row][head] == reweigh.best(ours, among, safe, 24)
        changed += chosen[row][head] != reweigh.best(scores, among, safe, 24)
    assert changed  # or the part does nothing


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("base", BASES)
def test_recency_adds_a_bonus_that_halves(base: str, shape: dict[str, Any]) -> None:
    """The bonus is counted in deviations of the head, or it would drown in large scores."""
    policy = kvkeep.policy(f"{base} + recency(weight=2, half_life=5)", budget=24, buffer=8)
    view = make_view(policy, **shape)
    chosen = kept(decide(policy, view))
    changed = 0
    for row, head, scores, ages, among, safe in each_head(
        view, kvkeep.policy(base, budget=24, buffer=8).score(view)
    ):
        ours = reweigh.with_recency(scores, ages, among, weight=2, half_life=5)
        assert chosen[row][head] == reweigh.best(ours, among, safe, 24)
        changed += chosen[row][head] != reweigh.best(scores, among, safe, 24)
    assert changed


@pytest.mark.parametrize("base", [*BASES, "vase-attnv", "r-kv", "snapkv + sample"])
def test_no_bonus_is_the_base(base: str) -> None:
    """Law 6: a weight of 0 changes no bit."""
    ours, theirs = (
        kvkeep.policy(text, budget=24, buffer=8) for text in (f"{base} + recency(weight=0)", base)
    )
    view = make_view(ours, lengths=(40, 31), group=2)
    assert kept(decide(ours, view)) == kept(decide(theirs, view))


def test_equal_values_weigh_nothing() -> None:
    """Law 6: where all values are equally long, the ranking is the base's."""
    ours, theirs = (kvkeep.policy(text, budget=24, buffer=8) for text in ("snapkv + norm-weighted", "snapkv"))
    view = make_view(ours, lengths=(40,), values=torch.ones(1, 2, 40, 8))
    assert kept(decide(ours, view)) == kept(decide(theirs, view))


def test_values_of_zeros_have_a_score() -> None:
    """A head whose values are all zero has no mean length; dividing by it would be NaN."""
    for base in ("snapkv", "keydiff"):
        policy = kvkeep.policy(f"{base} + norm-weighted", budget=24, buffer=8)
        decide(policy, make_view(policy, lengths=(40,), values=torch.zeros(1, 2, 40, 8)))


def layers(policy: Policy, count: int = 3) -> list[LayerView]:
    """Layers that hold the same positions and differ in all else."""
    first = make_view(policy, lengths=(40, 31), group=2)
    return [
        first,
        *(
            make_view(policy, lengths=(40, 31), group=2, positions=first.positions, layer=i, seed=i)
            for i in range(1, count)
        ),
    ]


@pytest.mark.parametrize("base", ["keydiff", "snapkv", "r-kv"])
def test_a_group_keeps_the_best_of_the_mean(base: str) -> None:
    """Groups of two and a rest of one: the mean of standardised scores decides for both layers of a group."""
    policy = kvkeep.policy(f"{base} + shared-layers(every=2)", budget=24, buffer=8)
    alone = kvkeep.policy(base, budget=24, buffer=8)
    views = layers(policy)
    counts = [make_counts(view) for view in views]
    chosen = [kept(each) for each in policy.decide(views, counts)]
    assert chosen[0] == chosen[1]
    assert chosen[2] == kept(alone.decide([views[2]], [counts[2]])[0])  # a group of one is the base
    assert chosen[2] != chosen[0]
    scores = [list(each_head(view, alone.score(view))) for view in views[:2]]
    for (row, head, one, _, among, safe), (_, _, other, *_) in zip(*scores, strict=True):
        z = zip(reweigh.standardized(one, among), reweigh.standardized(other, among), strict=True)
        assert chosen[0][row][head] == reweigh.best([a + b for a, b in z], among, safe, 24)


@pytest.mark.parametrize("base", ["snapkv", "vase-attnv", "vase-dkv + reserve", "keydiff + sample"])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_draws_and_reserves_of_a_group_are_one(base: str, every: int) -> None:
    """Layers of a group that drew by themselves would hold other tokens than their scores speak of."""
    policy = kvkeep.policy(f"{base} + shared-layers(every={every})", budget=24, buffer=8)
    views = layers(policy)
    chosen = [kept(each) for each in policy.decide(views, [make_counts(view) for view in views])]
    assert len({str(each) for each in chosen}) == -(-3 // every)
    if every == 1:
        theirs = kvkeep.policy(base, budget=24, buffer=8)
        assert chosen == [kept(theirs.decide([view], [make_counts(view)])[0]) for view in views]


def test_layers_of_a_group_hold_the_same_tokens_in_a_cache() -> None:
    """The engine must hand all layers in, and carry one decision out in each."""
    policy = kvkeep.policy("vase-attnv + shared-layers(every=2)", budget=24, buffer=8)
    model, ids = tiny_model("llama"), tokens(2, 80)
    cache = kvkeep.RetentionCache(model, policy)
    feed(model, cache, ids, torch.ones_like(ids), [40, *[1] * 40])
    assert cache.trace.evictions >= 8
    held = [[[head.tolist() for head in row] for row in cache.kept_positions(layer)] for layer in range(2)]
    assert held[0] == held[1]
    assert held[0][0][0] != held[0][0][1]  # heads stay apart


class TestText:
    """How the parts are written."""

    def test_any_order_is_one_policy(self) -> None:
        """A policy means the same whoever writes it down; its name builds it again."""
        text = "keydiff + norm-weighted + recency(weight=0.5) + sample + shared-layers(every=3)"
        backwards = " + ".join(["keydiff", *reversed(text.split(" + ")[1:])])
        one, other = (kvkeep.policy(each, budget=512) for each in (text, backwards))
        assert one == other
        assert one.name == text
        assert kvkeep.policy(one.name, budget=512) == one
        assert isinstance(one, SharedLayers)

    def test_union_modes_are_taken_layer_by_layer(self) -> None:
        """Values of one layer must not move what all layers keep; a bonus by age may."""
        assert kvkeep.policy("triattention + norm-weighted", budget=512).traits.scope == "layer"
        assert kvkeep.policy("triattention + recency", budget=512).traits.scope == "model"

    def test_per_head_and_per_layer_budgets_combine(self) -> None:
        """The routing family of the design space: three ways to share out, behind a changed score."""
        for share in ("adaptive-heads", "whole-model", "pyramid"):
            name = kvkeep.policy(f"snapkv + recency + {share}", budget=512).name
            assert name == f"snapkv + recency + {share}"

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("snapkv + recency(weight=-1)", "weight -1 is negative"),
            ("snapkv + recency(half_life=0)", "half_life 0 is not above 0"),
            ("snapkv + recency + recency", "names recency twice"),
            ("snapkv + sample + sample", "names sample twice"),
            ("snapkv + recency(weight=1, weight=2)", "sets weight twice"),
            ("snapkv + ", "cannot read '' in 'snapkv +' as a policy"),
            ("snapkv + adaptive-heads + adaptive-heads", "names adaptive-heads twice"),
            ("snapkv + sample + top-k", "chooses twice, by sample and top-k"),
            ("snapkv + recency(weight=lots)", "recency: weight 'lots' is not a finite number"),
            ("snapkv + cam(window=1.5)", "cam: window 1.5 is not a whole number"),
            ("snapkv + shared-layers(every=0)", "every 0 is below 1 layer"),
            ("dbtrimkv + shared-layers", "layers that share a selection cannot differ"),
            ("snapkv + shared-layers + whole-model", "cannot differ"),
            ("full + recency", "there is nothing to change"),
            ("snapkv + recency(life=3)", "life"),
        ],
    )
    def test_mistakes(self, text: str, problem: str) -> None:
        """Each says what is wrong and what to do."""
        with pytest.raises(ConfigError) as error:
            kvkeep.policy(text, budget=512)
        assert problem in str(error.value)
