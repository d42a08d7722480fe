"""random, streaming-llm, key-norm, keydiff: nothing is recorded for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

import kvkeep
from kvkeep.core.policy import Policy
from kvkeep.testing.views import SHAPES, decide, kept, make_view
from tests.reference import key_norm, keydiff, streaming_llm
from tests.reference.heads import Head, heads, keep_by_score
from tests.reference.random_stream import uniform


def expect(policy: Policy, shape: dict[str, Any], keep: Callable[[Head], list[int]]) -> None:
    """Compare what a policy keeps with a reference, head by head."""
    view = make_view(policy, **shape)
    expected = [[keep(head) for head in row] for row in heads(view)]
    assert kept(decide(policy, view)) == expected


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
class TestAgainstReferences:
    """A wrong sign or a counted empty slot would evict the wrong half of the cache."""

    def test_key_norm(self, shape: dict[str, Any]) -> None:
        """Long keys would be kept instead of short ones."""
        policy = kvkeep.KeyNorm(budget=24, buffer=8)
        expect(policy, shape, lambda head: keep_by_score(head, key_norm.score(head), 24))

    def test_keydiff(self, shape: dict[str, Any]) -> None:
        """Typical keys would be kept, or empty slots would bend the mean direction."""
        policy = kvkeep.KeyDiff(budget=24, buffer=8, sinks=2)
        expect(policy, shape, lambda head: keep_by_score(head, keydiff.score(head), 24))

    def test_streaming_llm(self, shape: dict[str, Any]) -> None:
        """The window or the sinks would be off by one."""
        policy = kvkeep.StreamingLLM(budget=24, buffer=8)
        expect(policy, shape, lambda head: streaming_llm.kept(head, 24, sinks=4))

    @pytest.mark.parametrize("redraw", [True, False])
    def test_random(self, shape: dict[str, Any], redraw: bool) -> None:
        """A lot would depend on where an entry is stored, not on the entry."""
        policy = kvkeep.RandomEviction(budget=24, buffer=8, redraw=redraw)
        rows = len(shape["lengths"])
        shape = shape | {"run_seed": 7, "layer": 3, "evictions": [5] * rows}

        def keep(head: Head) -> list[int]:
            eviction = 5 if redraw else -1
            lots = [uniform(7, head.row, 3, eviction, 0, head.number, p) for p in head.positions]
            return keep_by_score(head, lots, 24)

        expect(policy, shape, keep)


class TestByHand:
    """Cases small enough to check on paper."""

    def test_key_norm_keeps_the_shortest(self) -> None:
        """Norms 5, 1, 13, 2 and a recent one: the two shortest stay."""
        keys = torch.tensor([[3.0, 4], [1, 0], [5, 12], [0, 2], [9, 9]])[None, None]
        policy = kvkeep.KeyNorm(budget=3, buffer=1)
        assert kept(decide(policy, make_view(policy, keys=keys))) == [[[1, 3, 4]]]

    def test_keydiff_keeps_the_outlier(self) -> None:
        """Three keys point east, one west: the western one stays, however short it is."""
        keys = torch.tensor([[1.0, 0.1], [2, 0], [-0.1, 0], [5, -0.2], [1, 0]])[None, None]
        policy = kvkeep.KeyDiff(budget=2, buffer=1)
        assert kept(decide(policy, make_view(policy, keys=keys))) == [[[2, 4]]]

    def test_ties_go_to_the_oldest(self) -> None:
        """Equal scores broken by memory layout would differ between batch sizes."""
        policy = kvkeep.KeyNorm(budget=4, buffer=1)
        view = make_view(policy, keys=torch.ones(1, 2, 9, 4))
        assert kept(decide(policy, view)) == [[[0, 1, 2, 8], [0, 1, 2, 8]]]

    @pytest.mark.parametrize("name", ["key-norm", "keydiff"])
    def test_zero_keys_have_a_score(self, name: str) -> None:
        """A key of length zero would give NaN and stop the run."""
        policy = kvkeep.policy(name, budget=4, buffer=1)
        keys = torch.randn(1, 1, 6, 4)
        keys[0, 0, 2] = 0
        decide(policy, make_view(policy, keys=keys))

    def test_large_float16_keys(self) -> None:
        """Lengths beyond 65504 would become infinite, tie, and keep the wrong entries."""
        keys = torch.full((1, 1, 6, 8), 30000.0)
        keys[0, 0, 3] *= 0.9
        policy = kvkeep.KeyNorm(budget=2, buffer=1)
        assert kept(decide(policy, make_view(policy, keys=keys, dtype=torch.float16))) == [[[3, 5]]]


@pytest.mark.parametrize("name", ["random", "streaming-llm", "key-norm", "keydiff"])
def test_the_prompt_can_be_kept_on_top(name: str) -> None:
    """`prompt="kept"` is the form in which random is a strong floor; a lost prompt token breaks it."""
    policy = kvkeep.policy(name, budget=kvkeep.Budget(entries=16, prompt="kept"), buffer=8)
    view = make_view(policy, lengths=(40, 32), prompt_lens=(12, 10))
    decision = decide(policy, view, [28, 26])
    for row, prompt in enumerate((12, 10)):
        for head in kept(decision)[row]:
            assert head[:prompt] == list(range(prompt))
            assert len(head) == 16 + prompt


def test_new_lots_or_the_same() -> None:
    """Without redrawing, an entry that lost once could come back into an older sample."""
    for redraw, same in ((True, False), (False, True)):
        policy = kvkeep.RandomEviction(budget=24, buffer=8, redraw=redraw)
        first = make_view(policy, lengths=(40,), evictions=[0])
        second = make_view(policy, lengths=(40,), evictions=[1])
        assert (kept(decide(policy, first)) == kept(decide(policy, second))) is same


def test_random_is_uniform() -> None:
    """A bias towards some places would make the floor too low or too high."""
    policy = kvkeep.RandomEviction(budget=24, buffer=8)
    view = make_view(policy, lengths=[40] * 400, kv_heads=4, head_dim=2)
    counts = torch.zeros(40)
    for row in kept(decide(policy, view)):
        for head in row:
            counts[head] += 1
    expected, draws = 16 / 32, 1600
    assert bool((counts[32:] == draws).all())
    deviation = (counts[:32] / draws - expected) / (expected * (1 - expected) / draws) ** 0.5
    assert float(deviation.abs().max()) < 4


def test_policies_do_not_share_state() -> None:
    """One object used twice must not remember the first use."""
    policy = kvkeep.RandomEviction(budget=24, buffer=8)
    view = make_view(policy, lengths=(40,))
    assert kept(decide(policy, view)) == kept(decide(policy, view))
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.redraw = False  # type: ignore[misc]
