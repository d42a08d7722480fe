"""SnapKV while decoding: what the newest queries look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from kvkeep.core.traits import Traits
from kvkeep.core.view import LayerView
from kvkeep.policies.ranked import RankedPolicy
from kvkeep.scoring.window_attention import GroupReduce, window_attention


@dataclass(frozen=True, kw_only=True)
class SnapKV(RankedPolicy):
    """Keep the entries that the newest queries attend to most.

    What a short window of queries looks at is a good guess of what the next ones will look at. Their mean
    attention is smoothed along the text, so that an entry also earns from its neighbours.

    Parameters
    ----------
    budget
        Entries kept per KV head and layer.
    buffer
        Period of the evictions, in tokens (VaSE study: 64).
    window
        Newest queries that score, and newest entries always kept; ``None`` is the buffer.
    pool
        Width of the smoothing; 1 is off.
    pool_kind
        ``"avg"`` or ``"max"``.
    group_reduce
        How the query heads of a KV head are merged: ``"prob_mean"``, ``"logit_max"`` or ``"logit_mean"``.

    Source
    ------
    SnapKV, arXiv 2404.14469, repeated while decoding as in the VaSE study (arXiv 2606.03928, mode ``attn``).
    The R-KV repository's form is ``window=8, pool=7, pool_kind="max", group_reduce="logit_max", buffer=128``.

    Deviations
    ----------
    SnapKV itself compresses the prompt once; ``prefill="after", trigger="never"`` does that. Survivors
    stay in the order of their positions, so smoothing always runs along the text.

    Examples
    --------
    >>> SnapKV(budget=1024).traits.queries
    64
    """

    name: ClassVar[str] = "snapkv"
    mass: ClassVar[bool] = True
    recent_option: ClassVar[str] = "window"

    window: int | None = None
    pool: int = 5
    pool_kind: Literal["avg", "max"] = "avg"
    group_reduce: GroupReduce = "prob_mean"

    def __post_init__(self) -> None:
        self._require(self.window is None or self.window >= 1, f"window {self.window} is below 1 query")
        self._require(self.pool >= 1 and self.pool % 2 == 1, f"pool {self.pool} is not odd")
        self._require(self.pool_kind in ("avg", "max"), f"pool_kind {self.pool_kind!r} is not 'avg' or 'max'")
        known = ("prob_mean", "logit_max", "logit_mean")
        self._require(self.group_reduce in known, f"group_reduce {self.group_reduce!r} is none of {known}")
        super().__post_init__()

    @property
    def recent(self) -> int:
        """The observation window: its own entries are not candidates."""
        return self.buffer if self.window is None else self.window

    @property
    def traits(self) -> Traits:
        return Traits(trigger=self._make_trigger(), queries=self.recent)

    def score(self, view: LayerView) -> Tensor:
        """Attention of the window to everything older than it."""
        return window_attention(
            view.queries,
            view.query_positions,
            view.keys,
            view.positions,
            view.valid & ~view.recent(self.recent),
            group_reduce=self.group_reduce,
            pool=self.pool_kind if self.pool > 1 else "none",
            kernel=self.pool,
            stop=view.older_slots(self.recent),
        )
