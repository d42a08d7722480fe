"""KeyDiff: keep keys that point away from the crowd."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvkeep.core.view import LayerView
from kvkeep.policies.ranked import RankedPolicy
from kvkeep.scoring.redundancy import cosine_to_crowd


@dataclass(frozen=True, kw_only=True)
class KeyDiff(RankedPolicy):
    """Keep the entries whose keys differ most from the mean direction of all keys.

    Keys that point where all keys point carry little that the others do not; keys that stand apart
    are the ones that single queries pick out. No query is looked at.

    Parameters
    ----------
    budget
        Entries kept per KV head and layer.
    buffer
        Newest entries always kept, and period of the evictions.

    Source
    ------
    KeyDiff, arXiv 2504.15364.

    Deviations
    ----------
    Runs every ``buffer`` tokens while decoding; the paper runs after every block of a prompt
    (``prefill="chunk"`` does that as well).

    Notes
    -----
    The mean is taken over all stored entries of the head, newest and protected ones included.

    Examples
    --------
    >>> KeyDiff(budget=1024).traits.queries
    0
    """

    name: ClassVar[str] = "keydiff"

    def score(self, view: LayerView) -> Tensor:
        """``-cos(k, mean of the unit keys)``."""
        return -cosine_to_crowd(view.keys, view.valid)
