"""TrimKV: keep what a trained gate expects to be needed still."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvkeep.core.traits import DecodeTrigger, PrefillTrigger, Traits
from kvkeep.core.view import LayerView
from kvkeep.policies.ranked import RankedPolicy
from kvkeep.scoring.retention import retention


@dataclass(frozen=True, kw_only=True)
class TrimKV(RankedPolicy):
    """Keep the entries whose learned retention has decayed least.

    When a token is stored, a small trained gate says how fast its usefulness will fade: a number beta
    between 0 and 1 for every layer and KV head. After t tokens beta to the power of t is left of it. Entries
    that have faded most go, whatever the queries look at just now.

    Parameters
    ----------
    budget
        Entries kept per KV head and layer, ``M`` (papers: 128 to 1024).
    buffer
        Entries above the budget that an eviction waits for (examples of the code: 32 or 128).
    recent
        Newest entries always kept (code: 0, they survive by their score).
    ahead
        Queries ahead over which retention is summed (code: 1).
    prefill
        ``"after"``: once, when the prompt has been read; ``"chunk"``: after every chunk of it.

    Source
    ------
    TrimKV, arXiv 2512.03324; official code ngocbh/trimkv at ed920f36.

    Deviations
    ----------
    The code's own default for ``buffer`` is 1, an eviction at every token. A prompt is cut when it is above
    the budget, where the code waits for budget and buffer. Each layer evicts after its own attention, where
    the code waits for the last layer; the decision is the same.

    Notes
    -----
    Needs gates trained for the model (``gates=`` of the cache). Nothing is recorded while decoding: an
    eviction multiplies two numbers per entry. With beta = 1 everywhere all scores tie and the oldest stay.

    Examples
    --------
    >>> TrimKV(budget=512).traits.log_retention
    True
    """

    name: ClassVar[str] = "trimkv"
    recent_option: ClassVar[str] = "recent"

    buffer: int = 32
    recent: int = 0
    ahead: int = 1
    trigger: DecodeTrigger = "slack"
    prefill: PrefillTrigger = "after"

    def __post_init__(self) -> None:
        self._require(self.recent >= 0, f"recent {self.recent} is negative")
        self._require(self.ahead >= 1, f"ahead {self.ahead} is below 1 query")
        super().__post_init__()

    @property
    def traits(self) -> Traits:
        return Traits(trigger=self._make_trigger(), log_retention=True, trained=True)

    def score(self, view: LayerView) -> Tensor:
        """Log of the retention that is left at the next query."""
        return retention(view.log_retention, view.positions, view.seq_lens, ahead=self.ahead)
