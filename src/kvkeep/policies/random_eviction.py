"""Keep at random: the floor that a method has to beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvkeep.core.traits import Traits
from kvkeep.core.view import LayerView
from kvkeep.policies.ranked import RankedPolicy


@dataclass(frozen=True, kw_only=True)
class RandomEviction(RankedPolicy):
    """Keep a uniformly random choice of the entries.

    No entry is better than another. With the prompt kept on top of the budget, recent work found this
    to be a strong floor, so it belongs in every table.

    Parameters
    ----------
    budget
        Entries kept per KV head and layer; ``Budget(entries=1024, prompt="kept")`` keeps the prompt too.
    buffer
        Newest entries always kept, and period of the evictions.
    redraw
        True: new lots at every eviction, so an entry's chance shrinks each time and old entries become
        rare. False: every position keeps its lot, so what is kept is at any time a uniform sample of the
        whole past.

    Source
    ------
    The control of the VaSE study, arXiv 2606.03928 ("evict random"): the study states no rule, we take a
    uniform choice of the candidates.

    Deviations
    ----------
    none known

    Examples
    --------
    >>> RandomEviction(budget=1024).traits.random
    True
    """

    name: ClassVar[str] = "random"

    redraw: bool = True

    @property
    def traits(self) -> Traits:
        return Traits(trigger=self._make_trigger(), random=True)

    def score(self, view: LayerView) -> Tensor:
        """A lot between 0 and 1."""
        stream = view.random if self.redraw else view.random.persistent
        return stream.uniform(view.positions)
