"""What becomes of evicted values, against plain loops; and where nothing may become of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvkeep
from kvkeep.core.decision import KeepCounts, KeepDecision
from kvkeep.core.errors import ConfigError
from kvkeep.merging.cam import merge_cam
from kvkeep.merging.nearest import merge_nearest
from kvkeep.testing.views import decide, kept, make_view, row_of
from tests.reference import merging

SHAPES: list[dict[str, Any]] = [
    {"lengths": (40,), "group": 3},
    {"lengths": (25, 40, 31), "kv_heads": 3, "evicted": 5},
    {"lengths": ([40, 24, 33], [31, 40, 24]), "kv_heads": 3},
    {"lengths": (36,), "head_dim": 6, "value_dim": 10},
    {"lengths": (40, 33), "dtype": torch.bfloat16},
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("text", ["snapkv + merge", "snapkv + cam(window=3)", "vase-attnv + cam"])
def test_the_values_are_those_of_the_formula(text: str, shape: dict[str, Any]) -> None:
    """A value that joined the wrong entry, or with the wrong weight, would answer other questions."""
    policy = kvkeep.policy(text, budget=24, buffer=8)
    view = make_view(policy, **shape)
    decision = policy.decide([view], [KeepCounts(view.valid.sum(-1).clamp(max=24), 24)])[0]
    ours = policy.merge(view, decision)
    assert ours is not None
    assert (ours.shape, ours.dtype) == ((*decision.indices.shape, view.values.shape[-1]), view.values.dtype)
    changed = 0
    for row, heads in enumerate(kept(decision)):
        for head, chosen in enumerate(heads):
            n = int(view.valid[row, head].sum())
            keys, values = (each[row, head, :n].double().tolist() for each in (view.keys, view.values))
            if "merge" in text:
                theirs = merging.nearest(keys, values, chosen)
            else:
                chance = view.random.uniform(view.positions, purpose=0xCA3)[row, head, :n].tolist()
                attention = view.attention_sum[row, head, :n].tolist()
                window = 3 if "window" in text else 32
                theirs = merging.cam(values, attention, chance, chosen, window)
            mine = ours[row, head, : len(chosen)].double()
            # bfloat16 rounds the answer once; there is no other error.
            gap = 4e-3 if view.values.dtype == torch.bfloat16 else 1e-5
            assert torch.allclose(mine, torch.tensor(theirs, dtype=torch.float64), rtol=gap, atol=gap)
            before = view.values[row, head, chosen].double()
            changed += int((mine != before).any(-1).sum())
    assert changed > 8


# Whole numbers of whole length: what ties on paper ties in floating point, and no case need be left out.
_KEYS = torch.tensor(
    [[0, 0], [1, 0], [-2, 0], [0, 1], [0, -3], [3, 4], [6, 8], [-3, 4], [4, 3], [-4, -3]],
    dtype=torch.float64,
)


@given(st.integers(0, 1 << 20), st.integers(1, 12), st.integers(1, 6))
@settings(max_examples=40, deadline=None)
def test_any_decision_merges_as_the_loops_do(seed: int, stay: int, window: int) -> None:
    """Ties, equal keys, zeros, heads that keep one entry or nothing but the last."""
    source = torch.Generator().manual_seed(seed)
    shape = (1, 2, 12)
    keys = _KEYS[torch.randint(0, len(_KEYS), shape, generator=source)]
    values = torch.randint(-2, 3, (*shape, 3), generator=source).double()
    attention = torch.randint(0, 3, shape, generator=source).float()
    chance = torch.rand(shape, generator=source)
    places = [torch.randperm(12, generator=source)[:stay].sort().values for _ in range(2)]
    decision = KeepDecision(torch.stack(places)[None], torch.full((1, 2), stay))
    valid = torch.ones(shape, dtype=torch.bool)
    near = merge_nearest(keys, values, valid, decision)
    spread = merge_cam(values, attention, chance, valid, decision, window=window)
    for head in range(2):
        chosen, v = places[head].tolist(), values[0, head].tolist()
        theirs = merging.nearest(keys[0, head].tolist(), v, chosen)
        assert torch.allclose(near[0, head], torch.tensor(theirs).double())
        given_to = merging.cam(v, attention[0, head].tolist(), chance[0, head].tolist(), chosen, window)
        assert torch.allclose(spread[0, head], torch.tensor(given_to).double())


class TestNothingChanges:
    """Law 6: where nothing is evicted, or nothing can be merged, values stay to the last bit."""

    @pytest.mark.parametrize("text", ["snapkv + merge", "snapkv + cam(window=1)"])
    def test_what_nothing_joins_keeps_its_bits(self, text: str) -> None:
        """Rounding a value at every eviction would wear it out."""
        policy = kvkeep.policy(text, budget=24, buffer=8)
        view = make_view(policy, lengths=(24, 40), dtype=torch.bfloat16)
        decision = decide(policy, view)
        values = policy.merge(view, decision)
        assert values is not None
        assert torch.equal(values[0], view.values[0, :, :24])  # a row that evicts nothing
        joined = (values[1].float() != view.values[1].gather(1, _wide(decision, 8)[1]).float()).any(-1)
        assert 0 < joined.sum() < joined.numel()

    def test_a_window_of_nothing(self) -> None:
        """What stands behind all kept entries has nobody to give to."""
        values = torch.ones(1, 1, 6, 2)
        decision = KeepDecision(torch.tensor([[[0, 1]]]), torch.tensor([[2]]))
        valid, ones = torch.ones(1, 1, 6, dtype=torch.bool), torch.ones(1, 1, 6)
        merged = merge_cam(values, ones, 0 * ones, valid, decision, window=4)
        assert torch.equal(merged, values[:, :, :2])

    def test_policies_that_merge_nothing(self) -> None:
        """The engine asks only those that declare it."""
        policy = kvkeep.SnapKV(budget=24, buffer=8)
        view = make_view(policy, lengths=(40,))
        assert policy.merge(view, decide(policy, view)) is None
        assert not policy.traits.merges
        outer = kvkeep.policy("snapkv + merge + surprise", budget=24, buffer=8)
        assert outer.traits.merges
        view = make_view(outer, lengths=(40,))
        assert outer.merge(view, decide(outer, view)) is not None


def _wide(decision: KeepDecision, dim: int) -> torch.Tensor:
    return decision.indices[..., None].expand(*decision.indices.shape, dim)


@pytest.mark.parametrize("text", ["snapkv + merge", "vase-attnv + cam(window=3)", "h2o + cam"])
def test_alone_as_in_a_batch(text: str) -> None:
    """Law 4: neither neighbours, nor padding, nor the order of rows."""
    policy = kvkeep.policy(text, budget=24, buffer=8)
    view = make_view(policy, lengths=(25, 40, 31), kv_heads=2, group=3, evicted=6)
    together = policy.merge(view, decide(policy, view))
    assert together is not None
    for row in range(3):
        alone = make_view(policy, **row_of(view, row))
        values = policy.merge(alone, decide(policy, alone))
        assert values is not None
        assert torch.allclose(values[0], together[row], atol=1e-6)


def test_long_float16_values_stay_finite() -> None:
    """Squares of large float16 numbers are infinite; a mean of large values is not."""
    policy = kvkeep.policy("snapkv + merge", budget=24, buffer=8)
    values = torch.full((1, 2, 40, 8), 6e4, dtype=torch.float16)
    view = make_view(policy, lengths=(40,), values=values, dtype=torch.float16)
    merged = policy.merge(view, decide(policy, view))
    assert merged is not None
    assert torch.equal(merged, values[:, :, :24])


def test_cam_does_not_change_what_is_kept() -> None:
    """Its numbers come from a stream of their own, and its recordings must not lengthen the base's window."""
    for base in ("vase-attnv", "snapkv(window=4)", "keydiff + sample"):
        ours, theirs = (kvkeep.policy(text, budget=24, buffer=8) for text in (f"{base} + cam", base))
        view = make_view(ours, lengths=(40, 31), group=2)
        assert kept(decide(ours, view)) == kept(decide(theirs, view))
        assert ours.traits.queries == (theirs.traits.queries or 8)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("snapkv + cam(window=0)", "window 0 is below 1 entry"),
        ("snapkv + cam + merge", "merges evicted values twice"),
        ("full + merge", "there is nothing to change"),
    ],
)
def test_mistakes(text: str, problem: str) -> None:
    """Each says what is wrong and what to do."""
    with pytest.raises(ConfigError) as error:
        kvkeep.policy(text, budget=512)
    assert problem in str(error.value)
