"""TOVA: what the last query looks at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvkeep.core.traits import Traits
from kvkeep.core.view import LayerView
from kvkeep.policies.ranked import RankedPolicy
from kvkeep.scoring.window_attention import window_attention


@dataclass(frozen=True, kw_only=True)
class TOVA(RankedPolicy):
    """Keep the entries that the last query attends to, the same ones in every head of a layer.

    A decoder with a bounded cache is a recurrent network whose state is the cache; the simplest rule to
    keep the state small is to drop what the present token cares about least. All heads of the layer
    vote together.

    Parameters
    ----------
    budget
        Entries kept per KV head and layer.
    buffer
        Newest entries always kept, and period of the evictions; 1 is the paper's form.

    Source
    ------
    TOVA, arXiv 2401.06104.

    Deviations
    ----------
    Evicts ``buffer`` entries at once every ``buffer`` tokens and keeps the newest ``buffer``; the paper
    evicts one entry at every step and keeps only the newest (``buffer=1``).

    Examples
    --------
    >>> TOVA(budget=1024).traits.queries
    1
    """

    name: ClassVar[str] = "tova"
    mass: ClassVar[bool] = True
    one_set: ClassVar[bool] = True

    @property
    def traits(self) -> Traits:
        return Traits(trigger=self._make_trigger(), queries=1)

    def score(self, view: LayerView) -> Tensor:
        """Attention of the last query to all entries, mean over all heads of the layer."""
        attention = window_attention(
            view.queries, view.query_positions, view.keys, view.positions, view.valid
        )
        # All heads have always kept the same entries, so one index means one position in all of them.
        return attention.mean(1, keepdim=True).expand_as(attention)
