"""What most policies share: protection first, then the highest scores."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvkeep.core.decision import KeepCounts, KeepDecision
from kvkeep.core.policy import Policy
from kvkeep.core.view import LayerView
from kvkeep.selection.top_k import top_k


@dataclass(frozen=True, kw_only=True)
class RankedPolicy(Policy):
    """Base of the policies that keep the highest scores: they only write :meth:`score`."""

    def select(self, view: LayerView, scores: Tensor, counts: KeepCounts) -> KeepDecision:
        """Protected entries, then the highest scores until each head has its count."""
        return top_k(scores, counts, candidates=view.candidates, kept=view.protected)
