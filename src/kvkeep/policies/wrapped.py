"""What all policies share that change one thing of another policy: everything else is asked of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from torch import Tensor

from kvkeep.core.budget import Budget
from kvkeep.core.decision import KeepCounts, KeepDecision
from kvkeep.core.policy import Policy
from kvkeep.core.traits import DecodeTrigger, PrefillTrigger, Traits
from kvkeep.core.view import LayerView


@dataclass(frozen=True, kw_only=True)
class Wrapped(Policy):
    """Base of the policies that stand behind a ``+``.

    Parameters
    ----------
    base
        The policy that answers whatever the part does not.
    """

    part: ClassVar[str] = ""  # what is written after the "+"
    changes: ClassVar[str] = "change"  # what would be left to do with a base that evicts

    base: Policy

    # Whatever Policy has as fields comes from the base.
    budget: int | Budget = field(init=False, repr=False, default=0)
    buffer: int = field(init=False, repr=False, default=0)
    sinks: int = field(init=False, repr=False, default=0)
    trigger: DecodeTrigger = field(init=False, repr=False, default="never")
    prefill: PrefillTrigger = field(init=False, repr=False, default="defer")

    def __post_init__(self) -> None:
        for name in ("budget", "buffer", "sinks", "trigger", "prefill", "mass", "one_set"):
            object.__setattr__(self, name, getattr(self.base, name))
        object.__setattr__(self, "name", self._label())
        self._require(
            self.base.bounded, f"{self.base.name} keeps everything, so there is nothing to {self.changes}"
        )
        super().__post_init__()

    @classmethod
    def _called(cls) -> str:
        return cls.part or super()._called()

    def _check_budget(self, entries: int) -> None:
        """The base has checked its own."""

    def _label(self) -> str:
        """The text that builds this policy, the options of the base left out."""
        own = [each for each in dataclasses.fields(self) if each.init and each.name != "base"]
        given = {each.name: getattr(self, each.name) for each in own}
        text = ", ".join(
            f"{each.name}={given[each.name]}" for each in own if given[each.name] != each.default
        )
        return f"{self.base.name} + {self.part}" + (f"({text})" if text else "")

    @property
    def traits(self) -> Traits:
        return self.base.traits

    @property
    def recent(self) -> int:
        """What the base protects."""
        return self.base.recent

    @property
    def protects_prompt(self) -> bool:
        """What the base protects."""
        return self.base.protects_prompt

    @property
    def heads_alone(self) -> bool:
        """Only if the base's are."""
        return super().heads_alone and self.base.heads_alone

    @property
    def no_sample(self) -> str:
        """What the base objects to."""
        return self.base.no_sample

    def with_budget(self, budget: int | Budget) -> Self:
        """The same with another budget."""
        return dataclasses.replace(self, base=self.base.with_budget(budget))

    def per_layer(self) -> Self:
        """The same over a base that decides layer by layer."""
        return dataclasses.replace(self, base=self.base.per_layer())

    def check(self, spec: Any) -> list[str]:
        """Whatever the base objects to."""
        return self.base.check(spec)

    def score(self, view: LayerView) -> Tensor:
        """The base's score."""
        return self.base.score(view)

    def score_all(self, views: Sequence[LayerView]) -> list[Tensor]:
        """The base's scores."""
        return self.base.score_all(views)

    def allocate(
        self, views: Sequence[LayerView], scores: Sequence[Tensor], counts: Sequence[KeepCounts]
    ) -> list[KeepCounts]:
        """The base's counts."""
        return self.base.allocate(views, scores, counts)

    def select(self, view: LayerView, scores: Tensor, counts: KeepCounts) -> KeepDecision:
        """The base's choice."""
        return self.base.select(view, scores, counts)

    def merge(self, view: LayerView, decision: KeepDecision) -> Tensor | None:
        """The base's values."""
        return self.base.merge(view, decision)

    def decide_by(
        self, views: Sequence[LayerView], scores: Sequence[Tensor], counts: Sequence[KeepCounts]
    ) -> list[KeepDecision]:
        """The base's choice."""
        return self.base.decide_by(views, scores, counts)
