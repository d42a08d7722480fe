"""What becomes of evicted values: `+ merge`, `+ cam`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvkeep.core.decision import KeepDecision
from kvkeep.core.traits import Traits
from kvkeep.core.view import LayerView
from kvkeep.merging.cam import merge_cam
from kvkeep.merging.nearest import merge_nearest
from kvkeep.policies.wrapped import Wrapped

# Numbers for merging are drawn apart from those that the base chooses by.
_PURPOSE = 0xCA3


@dataclass(frozen=True, kw_only=True)
class Merge(Wrapped):
    """Let each evicted value join the kept entry of the same head whose key is nearest.

    A query that would have found the evicted key finds the nearest of those that stay, so its value
    should hold a part of what is gone. The new value is the mean of all that have met there, each
    weighing its own length. Keys and positions of kept entries do not change.

    Parameters
    ----------
    base
        Decides what stays.

    Source
    ------
    The merging press of kvpress: highest key cosine, value lengths as weights.

    Deviations
    ----------
    Runs at every eviction, where the press compresses a prompt once: a value that has taken others in
    weighs its present length when more join it. Sinks and newest entries take values in, too.

    Examples
    --------
    >>> from kvkeep.policies.snapkv import SnapKV
    >>> Merge(base=SnapKV(budget=512)).traits.merges
    True
    """

    part: ClassVar[str] = "merge"

    @property
    def traits(self) -> Traits:
        return dataclasses.replace(self.base.traits, merges=True)

    def merge(self, view: LayerView, decision: KeepDecision) -> Tensor:
        """New values of the kept entries."""
        return merge_nearest(view.keys, view.values, view.valid, decision)


@dataclass(frozen=True, kw_only=True)
class CaM(Wrapped):
    """Spread evicted values over the kept entries that follow them, the likelier the more attended they were.

    Dropping an entry takes its value out of every later output. Adding a part of it to each of the next
    entries keeps the sum, and a draw decides whether: an entry merges with the probability
    ``min(1, A / mean A of the window)`` of its accumulated attention.

    Parameters
    ----------
    base
        Decides what stays.
    window
        Kept entries after an evicted one that share its value (code: 32).

    Source
    ------
    CaM, as in kvpress (``cam_press``).

    Deviations
    ----------
    Each head merges what it evicts, where the code evicts the same entries in all heads. All evicted entries
    are candidates; the code takes the best of them, as many as there were steps since the last eviction,
    which is all of them in steady state. Random numbers are hashed from sequence and position.

    Notes
    -----
    Needs accumulated attention, which the engine sums once per eviction from recorded queries.

    Examples
    --------
    >>> from kvkeep.policies.snapkv import SnapKV
    >>> CaM(base=SnapKV(budget=512), window=16).name
    'snapkv + cam(window=16)'
    """

    part: ClassVar[str] = "cam"

    window: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.window >= 1, f"window {self.window} is below 1 entry")

    @property
    def traits(self) -> Traits:
        traits = self.base.traits
        # A base that records queries reads all of them: its ring must not become longer.
        queries = traits.queries or self.buffer
        return dataclasses.replace(traits, merges=True, attention_sum=True, random=True, queries=queries)

    def merge(self, view: LayerView, decision: KeepDecision) -> Tensor:
        """New values of the kept entries."""
        chance = view.random.uniform(view.positions, purpose=_PURPOSE)
        return merge_cam(view.values, view.attention_sum, chance, view.valid, decision, window=self.window)


# Parts that say what becomes of what is evicted, with the options each takes; one may stand after a "+".
STATES: dict[str, tuple[str, ...]] = {"merge": (), "cam": ("window",)}
