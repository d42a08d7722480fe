"""DBTrimKV: TrimKV with one budget for the whole model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvkeep.allocation.pool import Pool
from kvkeep.allocation.threshold import above_threshold
from kvkeep.allocation.whole_model import whole_model_plus
from kvkeep.core.decision import KeepCounts
from kvkeep.core.traits import Traits, Trigger
from kvkeep.core.view import LayerView
from kvkeep.policies.trim_kv import TrimKV


@dataclass(frozen=True, kw_only=True)
class DBTrimKV(TrimKV):
    """Keep the entries whose learned retention has decayed least, of all layers and heads together.

    The gates of all layers share their last projection, so that a retention means the same everywhere. The
    budget is then one for the model: a head that remembers for long keeps more, one that looks at the
    last few words next to nothing, and a head may become empty.

    Parameters
    ----------
    budget
        Entries per KV head and layer on average, ``M``: layers x heads x ``M`` stay.
    buffer
        Entries per head above the budget, on average, that an eviction waits for (examples of the code: 32
        or 128).
    recent
        Newest entries always kept in every head (code: 0).
    ahead
        Queries ahead over which retention is summed (code: 1).
    floor
        Entries that every head gets before the rest is ranked (code: ``min_tokens_per_head``, 0).
    threshold
        Keep what has at least so much retention left, between 0 and 1, every ``buffer`` tokens once more than
        the budget is stored. The budget then does not bound what stays.
    prefill
        ``"after"``: once, when the prompt has been read; ``"chunk"``: after every chunk of it.

    Source
    ------
    DBTrimKV, arXiv 2605.09649; official code ngocbh/trimkv at ed920f36.

    Deviations
    ----------
    Those of TrimKV in buffer and prompt. Where ``floor`` asks a head for more than it holds, the rest goes
    to the others, where the code leaves it unused. Ties go to the oldest entry.

    Notes
    -----
    Needs gates trained for the model (``gates=`` of the cache), best with a shared last projection. On texts
    longer than the rows of the training ``sinks=4`` may save much (docs/results/smollm2-gates.md).

    Examples
    --------
    >>> DBTrimKV(budget=512).traits.scope
    'model'
    """

    name: ClassVar[str] = "dbtrimkv"

    floor: int = 0
    threshold: float | None = None

    def __post_init__(self) -> None:
        self._require(self.floor >= 0, f"floor {self.floor} is negative")
        self._require(
            self.threshold is None or 0 < self.threshold < 1,
            f"threshold {self.threshold} is outside (0, 1)",
        )
        self._require(self.threshold is None or self.floor == 0, "a threshold decides alone: leave floor out")
        super().__post_init__()

    def _check_budget(self, entries: int) -> None:
        super()._check_budget(entries)
        self._require(
            self.floor <= entries,
            f"a floor of {self.floor} entries per head is above the budget of {entries}",
        )

    def _make_trigger(self) -> Trigger:
        by_clock = self.threshold is not None and self.trigger == "slack"
        return Trigger(decode="clock" if by_clock else self.trigger, prefill=self.prefill)

    @property
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits, scope="model", ragged=True, exact_budget=self.threshold is None
        )

    def allocate(
        self, views: Sequence[LayerView], scores: Sequence[Tensor], counts: Sequence[KeepCounts]
    ) -> list[KeepCounts]:
        """Counts by the ranking of all entries of the model."""
        pool = Pool.of(views, scores, counts)
        if self.threshold is None:
            shares = whole_model_plus(pool, added=self.floor)
        else:
            shares = above_threshold(pool, threshold=math.log(self.threshold))
        return pool.split(shares, [score.device for score in scores])
