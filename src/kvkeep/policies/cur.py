"""CurDKV: keep the rows that carry keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvkeep.core.traits import Traits
from kvkeep.core.view import LayerView
from kvkeep.policies.ranked import RankedPolicy
from kvkeep.scoring.leverage import LEVERAGES, Leverage, gaussian_projection, leverage, squared_norms


@dataclass(frozen=True, kw_only=True)
class CurDKV(RankedPolicy):
    """Keep the entries with the largest product of key and value length.

    A matrix can be rebuilt from a few of its own rows if one takes those that carry most of it. An
    entry is such a row of the keys and of the values at once, and its squared lengths tell how much it
    carries. Shares are taken within short stretches of text, so that no loud passage takes everything.

    Parameters
    ----------
    budget
        Entries kept per KV head and layer.
    buffer
        Newest entries always kept, and period of the evictions.
    sinks
        First tokens always kept (paper: 4).
    combine
        ``"kv_product"`` (paper), ``"kv_average"``, ``"key"`` or ``"value"``.
    rank
        Columns of a random Gaussian projection through which the lengths are seen, drawn once per sequence
        and layer; 0 (kvpress) takes the exact lengths.
    local_window
        Entries per stretch within which shares are taken (kvpress: 16); 0 is off.

    Source
    ------
    CurDKV, arXiv 2509.15038, with the defaults of kvpress (exact lengths, stretches of 16). The form of the
    VaSE study (mode ``cur_fixed_gauss``) is ``rank=20, local_window=0``.

    Deviations
    ----------
    Runs again at each eviction, over all but the newest entries; the paper compresses the prompt once.
    Sinks are kept by mask, where both codes set their score to 1, an upper bound of all others. The
    projection is hashed from sequence and layer and applied in float32.

    Notes
    -----
    No queries are recorded and no attention is computed.

    Examples
    --------
    >>> CurDKV(budget=1024).traits.random, CurDKV(budget=1024, rank=20).traits.random
    (False, True)
    """

    name: ClassVar[str] = "cur"
    mass: ClassVar[bool] = True

    sinks: int = 4
    combine: Leverage = "kv_product"
    rank: int = 0
    local_window: int = 16

    def __post_init__(self) -> None:
        self._require(self.combine in LEVERAGES, f"combine {self.combine!r} is none of {LEVERAGES}")
        self._require(self.rank >= 0, f"rank {self.rank} is negative")
        self._require(self.local_window >= 0, f"local_window {self.local_window} is negative")
        super().__post_init__()

    @property
    def traits(self) -> Traits:
        return Traits(trigger=self._make_trigger(), random=self.rank > 0)

    def score(self, view: LayerView) -> Tensor:
        """Share of each entry in the sum of ``||k||^2 ||v||^2`` over all but the newest."""
        projection = None
        if self.rank:
            dim = max(view.keys.shape[-1], view.values.shape[-1])
            projection = gaussian_projection(view.random.persistent, dim, self.rank)
        return leverage(
            squared_norms(view.keys, projection),
            squared_norms(view.values, projection),
            view.valid & ~view.recent(self.buffer),
            combine=self.combine,
            block=self.local_window,
        )
