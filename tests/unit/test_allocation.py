"""Counts per head against a naive reference: conservation, floors, ties, rows that mind only themselves."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import kvkeep
from kvkeep.allocation.adaptive_heads import mixed_with_equal, safeguarded
from kvkeep.allocation.pool import Pool
from kvkeep.allocation.pyramid import pyramid
from kvkeep.allocation.settle import settle
from kvkeep.allocation.threshold import above_threshold, above_threshold_within_share
from kvkeep.allocation.uniform import uniform
from kvkeep.allocation.whole_model import whole_model, whole_model_plus
from kvkeep.core.decision import KeepCounts
from kvkeep.scoring.calibrate import CALIBRATIONS, calibrate
from kvkeep.testing.views import make_view
from tests.reference import allocation as reference

LOWEST = float("-inf")


def pool_of(layers: list[list[list[reference.Head]]]) -> Pool:
    """A pool of ``[layer][row][head]``, with rubbish in the empty slots."""
    shares, least, most, scores, positions = [], [], [], [], []
    for layer in layers:
        slots = max(1, *(head.size for row in layer for head in row))
        score = torch.full((len(layer), len(layer[0]), slots), LOWEST)
        position = torch.full(score.shape, 3)
        for r, row in enumerate(layer):
            for h, head in enumerate(row):
                position[r, h, : head.size] = torch.tensor(head.positions)
                ranked = torch.tensor(head.scores)
                score[r, h, : head.size] = ranked.masked_fill(torch.tensor(head.protected).bool(), LOWEST)
        scores.append(score)
        positions.append(position)
        for target, name in ((shares, "share"), (least, "guarded"), (most, "size")):
            target.append(torch.tensor([[getattr(head, name) for head in row] for row in layer]))
    return Pool(
        torch.cat(shares, 1), torch.cat(least, 1), torch.cat(most, 1), tuple(scores), tuple(positions)
    )


@st.composite
def stores(draw: st.DrawFn) -> list[list[list[reference.Head]]]:
    """Layers of rows of heads of any length, empty ones among them; scores that tie often."""
    layers, rows, heads = draw(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)))
    values = draw(st.sampled_from([[0.0], [0.0, 1.0, 2.0], [i / 7 for i in range(-20, 20)]]))
    shares = draw(st.lists(st.integers(1, 12), min_size=rows, max_size=rows))
    source = random.Random(draw(st.integers(0, 1 << 30)))

    def head(layer: int, row: int) -> reference.Head:
        size = source.randrange(0, 16)
        guard = source.random() * 0.6
        return reference.Head(
            layer=layer,
            share=shares[row],
            scores=[source.choice(values) for _ in range(size)],
            positions=sorted(source.sample(range(40), size)),
            protected=[source.random() < guard for _ in range(size)],
        )

    return [[[head(layer, row) for _ in range(heads)] for row in range(rows)] for layer in range(layers)]


def row_heads(store: list[list[list[reference.Head]]], row: int) -> list[reference.Head]:
    """All heads of one row, layer after layer."""
    return [head for layer in store for head in layer[row]]


WAYS: dict[str, tuple[Any, Any]] = {
    "uniform": (uniform, lambda heads: reference._bounded(heads, [head.share for head in heads])),
    "pyramid": (pyramid, lambda heads: reference.pyramid(heads, 20)),
    "steep pyramid": (lambda pool: pyramid(pool, beta=1.5), lambda heads: reference.pyramid(heads, 1.5)),
    "whole": (whole_model, lambda heads: reference.whole_model(heads, [0] * len(heads))),
    "whole, floor 1": (
        lambda pool: whole_model(pool, floor=1),
        lambda heads: reference.whole_model(heads, [min(1, head.share) for head in heads]),
    ),
    "plus 2": (lambda pool: whole_model_plus(pool, added=2), lambda heads: reference.plus(heads, 2)),
    "safe": (
        safeguarded,
        lambda heads: reference.whole_model(heads, [int(0.2 * head.share) for head in heads]),
    ),
    "mixed": (mixed_with_equal, lambda heads: reference.mixed(heads, 0.5)),
    "mixed, 0.2": (lambda pool: mixed_with_equal(pool, floor=0.2), lambda h: reference.mixed(h, 0.2)),
}


@pytest.mark.parametrize("way", WAYS)
@given(store=stores())
@settings(max_examples=25, deadline=None)
def test_reference(way: str, store: list[list[list[reference.Head]]]) -> None:
    """One entry too many in one head is one too few in another: every count, of every row."""
    ours, theirs = WAYS[way]
    pool = pool_of(store)
    counts = ours(pool)
    for row in range(len(store[0])):
        heads = row_heads(store, row)
        assert counts[row].tolist() == theirs(heads)


@pytest.mark.parametrize("way", WAYS)
@given(store=stores())
@settings(max_examples=25, deadline=None)
def test_conserved_within_bounds_and_alone_as_in_a_batch(
    way: str, store: list[list[list[reference.Head]]]
) -> None:
    """The budget is a promise about the sum; a row's share of it depends on that row."""
    ours, _ = WAYS[way]
    pool = pool_of(store)
    counts = ours(pool)
    assert torch.equal(counts.sum(-1), pool.total)
    enough = pool.most.sum(-1) >= pool.shares.sum(-1)
    fits = pool.least.sum(-1) <= pool.shares.sum(-1)
    assert torch.equal(counts.sum(-1)[enough & fits], pool.shares.sum(-1)[enough & fits])
    assert bool((counts >= pool.least).all() and (counts <= pool.most).all())
    rows = len(store[0])
    for row in range(rows):
        alone = ours(pool_of([[layer[row]] for layer in store]))
        assert torch.equal(alone[0], counts[row])
    turned = ours(pool_of([layer[::-1] for layer in store]))
    assert torch.equal(turned.flip(0), counts)


@given(store=stores(), threshold=st.sampled_from([-1.0, 0.0, 1.0, 5.0]))
@settings(max_examples=25, deadline=None)
def test_threshold(store: list[list[list[reference.Head]]], threshold: float) -> None:
    """Protected or good enough: nothing else counts."""
    counts = above_threshold(pool_of(store), threshold=threshold)
    within = above_threshold_within_share(pool_of(store), threshold=threshold)
    for row in range(len(store[0])):
        heads = row_heads(store, row)
        assert counts[row].tolist() == [reference.good_enough(head, threshold) for head in heads]
        assert within[row].tolist() == [reference.best_of_good(head, threshold) for head in heads]


def full_pool(share: int, *, layers: int = 2, heads: int = 2, size: int = 12, seed: int = 0) -> Pool:
    """Heads of equal length without protection, scores that do not tie."""
    noise = torch.Generator().manual_seed(seed)
    shape = (2, heads, size)
    return Pool(
        shares=torch.full((2, layers * heads), share),
        least=torch.zeros(2, layers * heads, dtype=torch.int64),
        most=torch.full((2, layers * heads), size),
        scores=tuple(torch.randn(shape, generator=noise) for _ in range(layers)),
        positions=tuple(torch.arange(size).expand(shape) for _ in range(layers)),
    )


class TestReductions:
    """Law 6: switches at their end give the simpler method, entry by entry."""

    def test_uniform_is_no_allocation(self) -> None:
        pool = full_pool(7)
        assert torch.equal(uniform(pool), pool.shares)

    def test_floor_of_the_share_is_uniform(self) -> None:
        pool = full_pool(7)
        for counts in (
            whole_model(pool, floor=7),
            safeguarded(pool, safe=1.0),
            mixed_with_equal(pool, floor=1.0),
            whole_model_plus(pool, added=7),
        ):
            assert torch.equal(counts, pool.shares)

    def test_no_floor_is_the_plain_ranking(self) -> None:
        pool = full_pool(7)
        plain = whole_model(pool)
        assert not torch.equal(plain, pool.shares)
        for counts in (
            safeguarded(pool, safe=0.0),
            mixed_with_equal(pool, floor=0.0),
            whole_model_plus(pool, added=0),
        ):
            assert torch.equal(counts, plain)

    def test_one_head_of_one_layer_gets_its_share(self) -> None:
        pool = full_pool(7, layers=1, heads=1)
        for way, (ours, _) in WAYS.items():
            assert torch.equal(ours(pool), pool.shares), way

    def test_rank_of_equal_lengths_is_uniform(self) -> None:
        """With ranks every head competes with the same numbers."""
        pool = full_pool(6)
        everything = torch.ones(2, 2, 12, dtype=torch.bool)
        ranked = tuple(calibrate(score, everything, "rank") for score in pool.scores)
        assert torch.equal(whole_model(dataclasses.replace(pool, scores=ranked)), pool.shares)

    def test_a_pyramid_of_ties_falls(self) -> None:
        """By hand: share 6 of 20 entries in three layers, beta 3: 10, 6, 2."""
        assert pyramid(full_pool(6, layers=3, heads=1, size=20), beta=3.0)[0].tolist() == [10, 6, 2]
        # No more than there is: the first layer keeps its 8, the line is flatter.
        assert pyramid(full_pool(6, layers=3, heads=1, size=8), beta=3.0)[0].tolist() == [8, 6, 4]

    def test_ties_go_to_the_oldest_then_to_the_lowest_head(self) -> None:
        """Equal scores everywhere must not empty the last heads."""
        pool = full_pool(2)
        tied = dataclasses.replace(pool, scores=tuple(torch.zeros(2, 2, 12) for _ in range(2)))
        assert torch.equal(whole_model(tied), pool.shares)
        more = dataclasses.replace(tied, shares=torch.tensor([[2, 2, 2, 3]] * 2))
        assert whole_model(more)[0].tolist() == [3, 2, 2, 2]


@given(
    ideal=st.lists(st.floats(-3, 30), min_size=1, max_size=6), data=st.data(), seed=st.integers(0, 1 << 20)
)
@settings(max_examples=80, deadline=None)
def test_settle_is_the_reference(ideal: list[float], data: st.DataObject, seed: int) -> None:
    """Remainders, bounds and totals of any kind, among them totals at both ends."""
    noise = torch.Generator().manual_seed(seed)
    least = torch.randint(0, 5, (len(ideal),), generator=noise)
    most = least + torch.randint(0, 20, (len(ideal),), generator=noise)
    wanted = data.draw(st.integers(int(least.sum()), int(most.sum())))
    ours = settle(torch.tensor([ideal], dtype=torch.float64), least[None], most[None], torch.tensor([wanted]))
    assert ours[0].tolist() == reference.settle(ideal, least.tolist(), most.tolist(), wanted)


@pytest.mark.parametrize("mass", [False, True])
@pytest.mark.parametrize("by", CALIBRATIONS)
@given(seed=st.integers(0, 1 << 20))
@settings(max_examples=20, deadline=None)
def test_calibration(by: Any, mass: bool, seed: int) -> None:
    """Each head by itself, over what competes, whatever stands in the other slots."""
    noise = torch.Generator().manual_seed(seed)
    scores = torch.rand(2, 3, 9, generator=noise).mul(8).round().div(8)
    among = torch.rand(2, 3, 9, generator=noise) < 0.8
    among[..., 0] = True
    ours = calibrate(scores.masked_fill(~among, 1e30), among, by, mass=mass)
    assert ours.dtype == torch.float32
    for row in range(2):
        for head in range(3):
            mine = among[row, head]
            if mass and by == "softmax" and not scores[row, head][mine].sum():
                continue
            expected = reference.calibrated(scores[row, head][mine].tolist(), by, mass)
            assert ours[row, head][mine].tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_a_pool_reads_views() -> None:
    """Protected and empty slots do not compete; layers stand side by side."""
    policy = kvkeep.SnapKV(budget=24, buffer=8, sinks=2)
    views = [make_view(policy, lengths=([30, 20], [40, 9]), layer=layer) for layer in (0, 1)]
    counts = [KeepCounts(torch.full((2, 2), 24), 24)] * 2
    scores = [torch.rand(view.shape) for view in views]
    pool = Pool.of(views, scores, counts)
    assert pool.most.tolist() == [[30, 20, 30, 20], [40, 9, 40, 9]]
    assert pool.least[0].tolist() == [10, 10, 10, 10]
    assert pool.heads == [2, 2]
    assert pool.total.tolist() == [96, 96]
    ranked: Tensor = pool.scores[0]
    assert torch.equal(ranked.isfinite(), views[0].candidates)
    assert [count.largest for count in pool.split(torch.tensor([[1, 2, 7, 4]]), [ranked.device] * 2)] == [
        2,
        7,
    ]
