"""Laws 4 and 5 on hand-made views, for every policy that a view without a model can feed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvkeep
from kvkeep.core.policy import Policy
from kvkeep.testing.views import decide, kept, make_view, row_of


def from_a_view_alone(kind: type[Policy]) -> bool:
    """Whether a policy needs nothing of a model."""
    traits = kind(budget=64, buffer=16).traits
    return kind.bounded and not (traits.calibration or traits.query_moments or traits.rope)


TEXTS = [
    *(name for name, kind in kvkeep.available_policies().items() if from_a_view_alone(kind)),
    "r-kv(variant=vase)",
    "cur(rank=4)",
    "random(redraw=false)",
    "h2o(average=true)",
    "snapkv(window=5, pool=7, pool_kind=max, group_reduce=logit_max)",
    "snapkv + sample + reserve",
    "keydiff + sample",
    "tova + sample + reserve",
    "snapkv + norm-weighted",
    "keydiff + norm-weighted + sample",
    "tova + norm-weighted",
    "r-kv + recency(weight=2)",
]


@pytest.mark.parametrize("text", TEXTS)
class TestLaws:
    """One sentence of design.md each."""

    def test_a_sequence_decides_alone(self, text: str) -> None:
        """Law 4: neither neighbours, nor padding, nor the order of rows may change what is kept."""
        policy = kvkeep.policy(text, budget=24, buffer=8)
        view = make_view(policy, lengths=(25, 40, 31, 40), kv_heads=2, group=3, evicted=6)
        together = kept(decide(policy, view))
        for row in range(4):
            assert kept(decide(policy, make_view(policy, **row_of(view, row))))[0] == together[row]

    @pytest.mark.parametrize("fill", [0.0, 1.0, 60000.0])
    def test_protected_when_everything_ties(self, text: str, fill: float) -> None:
        """Law 5: equal scores, zero vectors and float16 at its limit."""
        policy = kvkeep.policy(text, budget=24, buffer=8, sinks=4)
        same = torch.full((2, 2, 40, 4), fill)
        view = make_view(policy, lengths=(40, 33), keys=same, values=same, dtype=torch.float16)
        decide(policy, view)

    def test_protected_when_the_prompt_is_kept(self, text: str) -> None:
        """Law 5: a prompt longer than the budget stays whole, and the budget comes on top."""
        budget: Any = kvkeep.Budget(entries=12, prompt="kept")
        policy = kvkeep.policy(text, budget=budget, buffer=4)
        view = make_view(policy, lengths=(40, 30), prompt_lens=(20, 9))
        for row, prompt in zip(kept(decide(policy, view, [32, 21])), (20, 9), strict=True):
            assert all(head[:prompt] == list(range(prompt)) for head in row)

    def test_one_above_the_budget(self, text: str) -> None:
        """The smallest eviction: exactly one entry goes, and it is not protected."""
        policy = kvkeep.policy(text, budget=24, buffer=8)
        view = make_view(policy, lengths=(25,), group=3)
        sizes = [len(head) for head in kept(decide(policy, view))[0]]
        assert sum(sizes) == 48
        assert policy.traits.ragged or sizes == [24, 24]
