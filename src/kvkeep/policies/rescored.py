"""Policies whose score is another policy's, slightly changed: `+ norm-weighted`, `+ recency`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvkeep.core.view import LayerView
from kvkeep.policies.wrapped import Wrapped
from kvkeep.scoring.reweigh import norm_weighted, relative_lengths, with_recency


@dataclass(frozen=True, kw_only=True)
class NormWeighted(Wrapped):
    """Multiply a policy's score by the length of the value, relative to the mean of its head.

    What an entry adds to the output is its attention times its value, so a long value that is seldom
    looked at may matter more than a short one that is looked at often. Scores that are shares (attention,
    leverage) are multiplied as they are. For the others the share is ``exp(z)`` of the standardised
    score, so that ``z + log(length / mean length)`` is ranked.

    Parameters
    ----------
    base
        Gives the score, and everything else. A base that gives all layers one score is taken in the mode in
        which each layer decides alone: values differ from layer to layer.

    Source
    ------
    Ours, for the study of the design space. Expected attention weighs in the same way, VATP (arXiv
    2406.12335) with the L1 norm.

    Deviations
    ----------
    none known

    Examples
    --------
    >>> from kvkeep.policies.snapkv import SnapKV
    >>> NormWeighted(base=SnapKV(budget=512)).name
    'snapkv + norm-weighted'
    """

    part: ClassVar[str] = "norm-weighted"

    def __post_init__(self) -> None:
        object.__setattr__(self, "base", self.base.per_layer())
        super().__post_init__()

    def score(self, view: LayerView) -> Tensor:
        """The base's score, weighted."""
        return self._weigh(view, self.base.score(view))

    def score_all(self, views: Sequence[LayerView]) -> list[Tensor]:
        """The base's scores, weighted."""
        return [self._weigh(*pair) for pair in zip(views, self.base.score_all(views), strict=True)]

    def _weigh(self, view: LayerView, scores: Tensor) -> Tensor:
        among = view.candidates
        ratio = relative_lengths(view.values, among, one_set=self.one_set)
        return norm_weighted(scores, ratio, among, mass=self.mass)


@dataclass(frozen=True, kw_only=True)
class Recency(Wrapped):
    """Add a bonus to the score of young entries that halves every so many tokens.

    Attention looks back a little more often than far: an entry just behind the recent window may be asked
    for before its score says so. The bonus is ``weight * d * 2 ** (-age / half_life)``, where ``d`` is the
    standard deviation of the scores that compete in the head, so that the unit of a score does not matter.

    Parameters
    ----------
    base
        Gives the score, and everything else.
    weight
        Bonus of the newest token, in standard deviations. 0 is the base.
    half_life
        Tokens after which half of the bonus is left.

    Source
    ------
    Ours, for the study of the design space.

    Deviations
    ----------
    none known

    Examples
    --------
    >>> from kvkeep.policies.snapkv import SnapKV
    >>> Recency(base=SnapKV(budget=512), half_life=128).name
    'snapkv + recency(half_life=128)'
    """

    part: ClassVar[str] = "recency"

    weight: float = 1.0
    half_life: float = 64.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.weight >= 0, f"weight {self.weight} is negative: it is a bonus")
        self._require(self.half_life > 0, f"half_life {self.half_life} is not above 0 tokens")

    def score(self, view: LayerView) -> Tensor:
        """The base's score and the bonus."""
        return self._add(view, self.base.score(view))

    def score_all(self, views: Sequence[LayerView]) -> list[Tensor]:
        """The base's scores and the bonus."""
        return [self._add(*pair) for pair in zip(views, self.base.score_all(views), strict=True)]

    def _add(self, view: LayerView, scores: Tensor) -> Tensor:
        if self.weight == 0:
            return scores
        return with_recency(
            scores,
            view.positions,
            view.seq_lens,
            view.candidates,
            weight=self.weight,
            half_life=self.half_life,
        )


# Parts that change a score, with the options each takes; each may stand after a "+".
SCORES: dict[str, tuple[str, ...]] = {"norm-weighted": (), "recency": ("weight", "half_life")}
