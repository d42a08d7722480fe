"""Key norm: short keys are attended to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvkeep.core.view import LayerView
from kvkeep.policies.ranked import RankedPolicy
from kvkeep.scoring.leverage import squared_norms


@dataclass(frozen=True, kw_only=True)
class KeyNorm(RankedPolicy):
    """Keep the entries with the shortest keys.

    In trained decoders a key of small length tends to attract much attention (sinks are the extreme
    case), so its length alone is a guess of how often the entry will be read. Nothing is recorded.

    Parameters
    ----------
    budget
        Entries kept per KV head and layer.
    buffer
        Newest entries always kept, and period of the evictions.

    Source
    ------
    "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression", arXiv 2406.11430.

    Deviations
    ----------
    All layers are cut; the paper also reports leaving the first two whole. The newest entries are kept
    until the next eviction.

    Examples
    --------
    >>> KeyNorm(budget=1024).traits.queries
    0
    """

    name: ClassVar[str] = "key-norm"

    def score(self, view: LayerView) -> Tensor:
        """``-||k||``."""
        return -squared_norms(view.keys).sqrt()
