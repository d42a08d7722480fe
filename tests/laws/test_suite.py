"""The conformance suite finds what it promises to find: one broken policy for each check."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest import SkipTest

import pytest
import torch
from torch import Tensor

import kvkeep
from kvkeep.core.decision import KeepCounts, KeepDecision
from kvkeep.core.errors import CacheIntegrityError, ConfigError, KvkeepError
from kvkeep.core.policy import Policy
from kvkeep.core.traits import Traits
from kvkeep.core.view import LayerView
from kvkeep.policies.ranked import RankedPolicy
from kvkeep.testing import check_policy, checks

BY_NAME = {str(check): check for check in checks()}


@dataclass(frozen=True, kw_only=True)
class Sound(RankedPolicy):
    """Keep the longest keys.

    Source
    ------
    A test.

    Deviations
    ----------
    none known
    """

    name: ClassVar[str] = "sound"
    sinks: int = 2

    def score(self, view: LayerView) -> Tensor:
        return view.keys.float().norm(dim=-1)


class Undocumented(Sound):
    """keep something"""


@dataclass(frozen=True, kw_only=True)
class Forgetful(Sound):
    """Keep the longest keys.

    Source
    ------
    A test.

    Deviations
    ----------
    none known
    """

    secret: int = 1

    def options(self) -> dict[str, Any]:
        return {name: value for name, value in super().options().items() if name != "secret"}


class Vague(Sound):
    def check(self, spec: Any) -> list[str]:
        return [""]


class OneShort(Sound):
    def select(self, view: LayerView, scores: Tensor, counts: KeepCounts) -> KeepDecision:
        decision = super().select(view, scores, counts)
        return KeepDecision(decision.indices, decision.lengths - 1)


class Narrow(Sound):
    def select(self, view: LayerView, scores: Tensor, counts: KeepCounts) -> KeepDecision:
        decision = super().select(view, scores, counts)
        return KeepDecision(decision.indices[..., 1:], decision.lengths - 1)


class Unprotected(Sound):
    """Trusts in the score of sinks."""

    def select(self, view: LayerView, scores: Tensor, counts: KeepCounts) -> KeepDecision:
        bare = dataclasses.replace(view, protected=torch.zeros_like(view.protected))
        return super().select(bare, scores, counts)


class MagicScore(Sound):
    """Gives sinks and newest entries a large score instead of a mask."""

    def select(self, view: LayerView, scores: Tensor, counts: KeepCounts) -> KeepDecision:
        bare = dataclasses.replace(view, protected=torch.zeros_like(view.protected))
        return super().select(bare, scores.masked_fill(view.protected, 1e4), counts)

    def score(self, view: LayerView) -> Tensor:
        return view.values.float().square().sum(-1)


class SlotProtected(Sound):
    """Protects the first and last slots instead of positions."""

    def select(self, view: LayerView, scores: Tensor, counts: KeepCounts) -> KeepDecision:
        protected = torch.zeros_like(view.protected)
        protected[..., : self.sinks] = True
        protected[..., -self.buffer :] = True
        return super().select(dataclasses.replace(view, protected=protected & view.valid), scores, counts)


class Half(Sound):
    def score(self, view: LayerView) -> Tensor:
        return super().score(view).to(view.keys.dtype)


class Overflowing(Sound):
    def score(self, view: LayerView) -> Tensor:
        return (view.keys.float() * 1e30).square().sum(-1)


class Writing(Sound):
    def score(self, view: LayerView) -> Tensor:
        scores = super().score(view)
        view.values.mul_(0.5)
        return scores


class Undeclared(Sound):
    def score(self, view: LayerView) -> Tensor:
        return view.random.uniform(view.positions)


class GlobalDraw(Sound):
    def score(self, view: LayerView) -> Tensor:
        return torch.rand(view.shape)


class Counting(Sound):
    """Remembers how often it was asked."""

    calls: ClassVar[list[int]] = []

    def score(self, view: LayerView) -> Tensor:
        self.calls.append(1)
        return super().score(view) + len(self.calls) * view.positions % 7


class Neighbours(Sound):
    """Scores against the mean of everything in the tensor, empty slots and other rows included."""

    def score(self, view: LayerView) -> Tensor:
        return (view.keys.float() * view.keys.float().mean((0, 2), keepdim=True)).sum(-1)


class Favourite(Sound):
    def score(self, view: LayerView) -> Tensor:
        sign = torch.ones(view.shape[1])
        sign[0] = -1.0
        return super().score(view) * sign[None, :, None]


class Crowd(Sound):
    """Scores a head against the mean of all."""

    def score(self, view: LayerView) -> Tensor:
        return (view.keys.float() * view.keys.float().mean(1, keepdim=True)).sum(-1)


class Eager(Sound):
    """Evicts although there is room."""

    @property
    def amount(self) -> kvkeep.Budget:
        return kvkeep.Budget(entries=min(super().amount.count, 20))


class Hoarding(Sound):
    """Declares that it evicts between chunks, and does not."""

    @property
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits, trigger=dataclasses.replace(super().traits.trigger, prefill="defer")
        )


BROKEN: dict[str, type[Policy]] = {
    "documented": Undocumented,
    "rebuilt-from-options": Forgetful,
    "refusals-are-reasons": Vague,
    "decisions-are-sound": OneShort,
    "protection-is-by-position": SlotProtected,
    "protection-survives-ties": Unprotected,
    "protection-survives-large-float16": MagicScore,
    "scores-are-finite": Half,
    "inputs-are-left-alone": Writing,
    "reads-only-what-it-declares": Undeclared,
    "same-stream-same-decision": GlobalDraw,
    "empty-slots-do-not-count": Neighbours,
    "heads-are-alike": Favourite,
    "heads-decide-alone": Crowd,
    "prompts-in-chunks": Hoarding,
    "alone-as-in-a-batch": Neighbours,
    "nothing-to-evict-nothing-changed": Eager,
    "nothing-leaks": Counting,
}


@pytest.mark.parametrize(("name", "broken"), BROKEN.items(), ids=BROKEN)
def test_a_broken_policy_is_found(name: str, broken: type[Policy]) -> None:
    """A check that passes everything gives a false sense of safety."""
    with pytest.raises((AssertionError, KvkeepError)):
        BY_NAME[name](broken)
    BY_NAME[name](Sound)


def test_a_decision_of_the_wrong_shape_is_refused_by_the_engine() -> None:
    """Entries would be moved to the wrong place without a word."""
    with pytest.raises(
        CacheIntegrityError, match=r"sound decided on layer 0 with indices of shape \(2, 2, 23\)"
    ):
        BY_NAME["oracle-llama"](Narrow)


def test_an_infinite_score_is_found() -> None:
    """Infinity minus infinity is the usual way to a NaN two steps later."""
    with pytest.raises(AssertionError, match="not finite"):
        BY_NAME["scores-are-finite"](Overflowing)


def test_a_thawed_policy_is_found() -> None:
    """A number changed between two evictions cannot be seen in any log."""

    class Thawed(Sound):
        def __setattr__(self, name: str, value: object) -> None:
            object.__setattr__(self, name, value)

    with pytest.raises(AssertionError, match="frozen=True"):
        BY_NAME["frozen"](Thawed)


def test_all_failures_are_reported_at_once() -> None:
    """The author of a policy wants the whole list, not one line per run."""
    with pytest.raises(AssertionError) as caught:
        check_policy(Unprotected)
    text = str(caught.value)
    assert "decisions-are-sound: " in text
    assert "protection-is-by-position: protected positions" in text
    assert "oracle" not in text  # what is left is attended to correctly all the same


@pytest.mark.parametrize(
    "given",
    [Sound, Sound(budget=20, buffer=4), lambda: Sound(budget=20, buffer=4)],
    ids=["class", "object", "function"],
)
def test_a_class_an_object_or_a_function_will_do(given: Policy | Callable[[], Policy]) -> None:
    """Whatever is at hand in a test can be passed."""
    BY_NAME["decisions-are-sound"](given)


def test_what_is_no_policy_is_refused() -> None:
    """The commonest slip is to pass the name."""
    with pytest.raises(ConfigError, match="neither a policy nor something that makes one"):
        BY_NAME["documented"]("sound")  # type: ignore[arg-type]


def test_a_policy_that_keeps_everything_skips_the_checks_of_evictions() -> None:
    """pytest shows the reason; check_policy goes on."""
    with pytest.raises(SkipTest, match="full keeps everything"):
        BY_NAME["decisions-are-sound"](kvkeep.Full)
