"""Set diversity: the greedy choice against a naive loop and a lazy heap, and its reductions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvkeep.core.decision import KeepCounts
from kvkeep.core.errors import ConfigError
from kvkeep.core.view import LayerView
from kvkeep.policies.set_diversity import SetDiversity
from kvkeep.policies.triattention import TriAttention
from kvkeep.selection.diverse import diverse, unit_signatures
from kvkeep.selection.top_k import top_k
from kvkeep.testing.views import decide, kept, make_counts
from tests.calibrated import make_layers
from tests.reference.diverse import greedy, lazy_greedy


def pick(scores: Tensor, vectors: Tensor, count: int, **options: object) -> list[int]:
    """Indices kept of one row and head."""
    options = {"candidates": torch.ones_like(scores, dtype=torch.bool), "weight": 0.5} | options
    options.setdefault("kept", torch.zeros_like(scores, dtype=torch.bool))
    signatures = unit_signatures(
        vectors[None, None], options["candidates"][None, None] | options["kept"][None, None]
    )
    masks = {name: options.pop(name)[None, None] for name in ("candidates", "kept")}
    counts = KeepCounts(torch.tensor([[count]]), count)
    decision = diverse(scores[None, None], signatures, counts, **masks, **options)
    return kept(decision)[0][0]


def some(entries: int, dim: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    return torch.randn(entries, generator=source), torch.randn(entries, dim, generator=source)


@pytest.mark.parametrize("similarity", ["max", "mean", "sum"])
@pytest.mark.parametrize("clamp", [True, False])
@pytest.mark.parametrize("start", [False, True])
def test_greedy_equals_the_naive_loop(similarity: str, clamp: bool, start: bool) -> None:
    """The method would pick other tokens than its definition."""
    for seed in range(4):
        scores, vectors = some(30, seed=seed)
        kept_mask = torch.zeros(30, dtype=torch.bool)
        kept_mask[torch.tensor([0, 1, 17])] = True
        out = torch.tensor([4, 29])  # empty slots: neither kept nor candidates
        candidates = ~kept_mask
        candidates[out] = False
        options = {"similarity": similarity, "clamp": clamp, "weight": 0.8}
        ours = pick(
            scores, vectors, 15, candidates=candidates, kept=kept_mask, start_from_kept=start, **options
        )
        expected = greedy(
            scores.tolist(),
            vectors.tolist(),
            12,
            candidates=candidates.nonzero()[:, 0].tolist(),
            start=[0, 1, 17] if start else [],
            **options,
        )
        assert ours == sorted([*expected, 0, 1, 17])


def test_greedy_equals_the_lazy_heap() -> None:
    """The loop would not be the facility-location-like greedy choice that the heap solves."""
    for seed in range(6):
        scores, vectors = some(40, seed=seed)
        expected = lazy_greedy(scores.tolist(), vectors.tolist(), 25, 0.5)
        assert pick(scores, vectors, 25) == sorted(expected)
        assert expected == greedy(scores.tolist(), vectors.tolist(), 25, 0.5)


def test_similarity_to_what_is_kept_is_summed_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long protected prompt would be compared in one huge matrix, or its blocks would not add up."""
    scores, vectors = some(30)
    start = torch.arange(30) < 13
    for similarity in ("max", "sum"):
        options = {"candidates": ~start, "kept": start, "start_from_kept": True, "similarity": similarity}
        whole = pick(scores, vectors, 20, **options)
        with monkeypatch.context() as patch:
            patch.setattr("kvkeep.selection.diverse._BLOCK_ELEMENTS", 30 * 4)
            assert pick(scores, vectors, 20, **options) == whole


def test_weight_zero_is_top_k_with_ties() -> None:
    """Lambda = 0 would not be the baseline that every claim is measured against."""
    scores = torch.randint(0, 4, (2, 3, 50)).float()
    signatures = unit_signatures(torch.randn(2, 3, 50, 4), torch.ones(2, 3, 50, dtype=torch.bool))
    protected = torch.rand(2, 3, 50) < 0.1
    counts = KeepCounts(torch.tensor([[20, 21, 22], [23, 24, 25]]), 25)
    masks = {"candidates": ~protected, "kept": protected}
    ours = diverse(scores, signatures, counts, weight=0.0, **masks)
    assert torch.equal(ours.indices, top_k(scores, counts, **masks).indices)


@pytest.mark.parametrize("mode", ["union", "per-head", "per-layer-per-head"])
@pytest.mark.parametrize("renorm", ["none", "zscore"])
def test_lambda_zero_is_triattention(mode: str, renorm: str) -> None:
    """The policy's lambda = 0 would differ from TriAttention's top-k, so no gain could be attributed."""
    options = {"budget": 24, "mode": mode, "protect_prompt": False, "recent": 3}
    plain, zero = TriAttention(**options), SetDiversity(**options, lam=0.0, renorm=renorm)
    views = make_layers(plain)
    counts = [make_counts(view) for view in views]
    for ours, theirs in zip(zero.decide(views, counts), plain.decide(views, counts), strict=True):
        assert torch.equal(ours.indices, theirs.indices)
        assert torch.equal(ours.lengths, theirs.lengths)


def test_a_duplicate_is_delayed_by_lambda() -> None:
    """Two tokens that say the same would both be kept at the cost of a third."""
    vectors = torch.eye(4)[[0, 0, 1, 2]]
    assert pick(torch.tensor([2.0, 1.9, 1.45, 0.0]), vectors, 2) == [0, 2]
    assert pick(torch.tensor([2.0, 1.9, 1.35, 0.0]), vectors, 2) == [0, 1]


@pytest.mark.parametrize("weight", [0.0, 0.5, 10.0])
def test_everything_fits(weight: float) -> None:
    """With room for all, a penalty would still evict something."""
    scores, vectors = some(12)
    assert pick(scores, vectors, 12, weight=weight) == list(range(12))


@pytest.mark.parametrize("similarity", ["max", "mean", "sum"])
def test_orthogonal_signatures_are_never_charged(similarity: str) -> None:
    """Tokens that have nothing in common would be charged for it."""
    scores, _ = some(9)
    best = sorted(scores.topk(4).indices.tolist())
    for weight in (0.1, 1.0, 100.0):
        assert pick(scores, torch.eye(9), 4, weight=weight, similarity=similarity) == best


def test_ties_go_to_the_lowest_index() -> None:
    """Equal tokens would be kept in an order that depends on the machine."""
    assert pick(torch.zeros(20), torch.eye(20), 5) == [0, 1, 2, 3, 4]


def test_a_zero_value_is_like_nothing() -> None:
    """A drained value (an attention sink's) would become NaN and win or lose for ever."""
    vectors = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 0.0]])
    assert pick(torch.tensor([1.0, 0.8, 0.9]), vectors, 2) == [0, 1]


def test_uneven_counts_and_heads() -> None:
    """Heads or rows that need fewer picks would go on picking."""
    scores, vectors = torch.randn(2, 2, 15), torch.randn(2, 2, 15, 3)
    everything = torch.ones(2, 2, 15, dtype=torch.bool)
    counts = KeepCounts(torch.tensor([[3, 9], [0, 5]]), 9)
    decision = diverse(
        scores,
        unit_signatures(vectors, everything),
        counts,
        candidates=everything,
        kept=~everything,
        weight=0.5,
    )
    for row in range(2):
        for head in range(2):
            expected = greedy(
                scores[row, head].tolist(), vectors[row, head].tolist(), int(counts.per_head[row, head]), 0.5
            )
            assert kept(decision)[row][head] == sorted(expected)


def shared_views(policy: SetDiversity) -> list[LayerView]:
    positions = torch.arange(40).expand(2, 2, -1)
    return make_layers(policy, positions=positions, evicted=0, prompt_lens=[6, 4], lengths=(40, 33))


@pytest.mark.parametrize("mode", ["union", "per-head", "per-layer-per-head"])
@pytest.mark.parametrize("start", [False, True])
def test_signatures_follow_the_mode(mode: str, start: bool) -> None:
    """Likeness would be measured between values that the choice is not about."""
    policy = SetDiversity(budget=24, mode=mode, recent=4, lam=0.7, start_from_protected=start)
    views = shared_views(policy)
    scores = policy.score_all(views)
    decisions = policy.decide(views, [make_counts(view) for view in views])
    stacked = torch.stack([view.values for view in views]).double()
    for layer, decision in enumerate(decisions):
        for row, length in enumerate((40, 33)):
            for head in range(2):
                if mode == "union":
                    vectors = stacked[:, row].mean((0, 1))
                elif mode == "per-head":
                    vectors = stacked[:, row, head].mean(0)
                else:
                    vectors = stacked[layer, row, head]
                protected = list(range(length - 4, length))
                expected = greedy(
                    scores[layer][row, head].tolist(),
                    vectors.tolist(),
                    20,
                    0.7,
                    candidates=range(length - 4),
                    start=protected if start else [],
                )
                assert kept(decision)[row][head] == sorted([*expected, *protected])


def test_renorm_changes_the_scale_of_the_scores() -> None:
    """The option would be ignored."""
    options = {"budget": 24, "normalize": False, "lam": 2.0}
    views = shared_views(SetDiversity(**options))
    for view in views:
        view.calibration.mean *= 10
        view.calibration.magnitude *= 10
    plain, renormed = SetDiversity(**options), SetDiversity(**options, renorm="zscore")
    scores = plain.score_all(views)[0]
    counts = [make_counts(view) for view in views]
    decisions = [kept(each.decide(views, counts)[0]) for each in (plain, renormed)]
    assert decisions[0] != decisions[1]
    row = scores[0, 0].double()
    standard = (row - row.mean()) / row.std(correction=0)
    vectors = torch.stack([view.values[0] for view in views]).double().mean((0, 1))
    assert decisions[1][0][0] == sorted(greedy(standard.tolist(), vectors.tolist(), 24, 2.0))


def test_the_prompt_competes() -> None:
    """At budgets of 64 a protected prompt could never fit."""
    policy = SetDiversity(budget=24)
    assert not policy.protects_prompt
    assert SetDiversity(budget=24, protect_prompt=True).protects_prompt
    assert (policy.mode, policy.buffer, policy.lam) == ("union", 128, 0.5)
    assert SetDiversity(**policy.options()) == policy
    view = make_layers(policy, layers=1)[0]
    decide(policy, view)


@pytest.mark.parametrize("options", [{"similarity": "min"}, {"lam": -0.1}, {"renorm": "z"}, {"mode": "all"}])
def test_bad_options_are_refused(options: dict[str, object]) -> None:
    """A typo would silently run another method."""
    with pytest.raises(ConfigError, match=next(iter(options))):
        SetDiversity(budget=20, **options)


@pytest.mark.parametrize(("protection", "agree"), [({}, True), ({"recent": 6}, False), ({"sinks": 6}, False)])
def test_counting_protected_entries_matters_only_where_something_is_protected(
    protection: dict[str, int], agree: bool
) -> None:
    """The docstring says where our default leaves the reconstruction that counts them."""
    found = []
    for start in (False, True):
        policy = SetDiversity(budget=24, lam=2.0, start_from_protected=start, **protection)
        views = shared_views(policy)
        decisions = policy.decide(views, [make_counts(view) for view in views])
        found.append([kept(decision) for decision in decisions])
    assert (found[0] == found[1]) is agree
    assert not SetDiversity(budget=24).start_from_protected
