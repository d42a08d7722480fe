"""Nothing is evicted: the baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.core.budget import Budget
from kvkeep.core.traits import DecodeTrigger, Traits
from kvkeep.core.view import LayerView
from kvkeep.policies.ranked import RankedPolicy


@dataclass(frozen=True, kw_only=True)
class Full(RankedPolicy):
    """Keep everything: the full cache, in the same storage as the policies.

    The baseline of every table. Memory grows with each token.

    Parameters
    ----------
    budget, buffer, sinks, trigger, prefill
        Accepted and ignored, so that one command line serves every policy.

    Source
    ------
    None: the ordinary cache.

    Deviations
    ----------
    none known

    Examples
    --------
    >>> Full().bounded
    False
    """

    name: ClassVar[str] = "full"
    bounded: ClassVar[bool] = False

    budget: int | Budget = 1 << 30
    trigger: DecodeTrigger = "never"

    def _check_budget(self, entries: int) -> None:
        """Any budget will do."""

    @property
    def traits(self) -> Traits:
        return Traits(trigger=self._make_trigger())

    def score(self, view: LayerView) -> Tensor:
        """Every entry alike."""
        return torch.zeros(view.shape, device=view.positions.device)
