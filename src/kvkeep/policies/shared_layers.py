"""One selection for a group of layers: `+ shared-layers(every=N)`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.core.decision import KeepCounts, KeepDecision
from kvkeep.core.traits import Traits
from kvkeep.core.view import LayerView
from kvkeep.policies.wrapped import Wrapped
from kvkeep.scoring.standardize import deviations, standardize


@dataclass(frozen=True, kw_only=True)
class SharedLayers(Wrapped):
    """Let groups of neighbouring layers keep the same tokens, by the mean of their scores.

    Neighbouring layers often look at the same places. One choice for several of them is steadier than each
    layer's own, and blind to what only one of them needs. Scores are standardised per layer and head before
    the mean is taken; heads stay apart: head 0 of all layers of a group decides for heads 0.

    Parameters
    ----------
    base
        Gives the scores, and chooses, once for each group. One that gives all layers one score is taken in
        the mode in which each layer decides alone.
    every
        Layers per group, in the order of the model; the last group may be smaller. 1 is the base.

    Source
    ------
    Ours, for the study of the design space.

    Deviations
    ----------
    none known

    Notes
    -----
    Scores that are shares are divided by their deviation and not centred, which ranks alike and leaves
    them shares. What the base looks at beside the scores (a reserve's values, random numbers) is
    that of the first layer of the group.

    Examples
    --------
    >>> from kvkeep.policies.snapkv import SnapKV
    >>> SharedLayers(base=SnapKV(budget=512), every=4).name
    'snapkv + shared-layers(every=4)'
    """

    part: ClassVar[str] = "shared-layers"

    every: int = 2

    def __post_init__(self) -> None:
        object.__setattr__(self, "base", self.base.per_layer())
        super().__post_init__()
        self._require(self.every >= 1, f"every {self.every} is below 1 layer")
        self._require(
            not self.base.traits.ragged,
            f"{self.base.name} gives heads or layers different numbers of entries, and layers that share a "
            "selection cannot differ: leave one of the two out",
        )

    @property
    def traits(self) -> Traits:
        return dataclasses.replace(self.base.traits, scope="model", shared=True)

    def decide_by(
        self, views: Sequence[LayerView], scores: Sequence[Tensor], counts: Sequence[KeepCounts]
    ) -> list[KeepDecision]:
        """The base's choice for the first layer of each group, carried out in all of them."""
        decisions: list[KeepDecision] = []
        for start in range(0, len(views), self.every):
            group = range(start, min(start + self.every, len(views)))
            leader = views[start]
            shared = self._mean(leader, [scores[layer] for layer in group])
            (decision,) = self.base.decide_by([leader], [shared], [counts[start]])
            for layer in group:
                device = scores[layer].device
                decisions.append(KeepDecision(decision.indices.to(device), decision.lengths.to(device)))
        return decisions

    def _mean(self, leader: LayerView, scores: Sequence[Tensor]) -> Tensor:
        if len(scores) == 1:
            return scores[0]
        among, home = leader.candidates, scores[0].device
        # Sums run in float64: empty slots behind a row must not move a score by a rounding.
        total = torch.zeros_like(scores[0], dtype=torch.float64)
        for score in scores:
            own = score.to(home).double()
            total += own / deviations(own, among) if self.mass else standardize(own, among)
        return (total / len(scores)).float()


# Parts that say which layers see what, with the options each takes; each may stand after a "+".
ROUTES: dict[str, tuple[str, ...]] = {"shared-layers": ("every",)}
