"""H2O: heavy hitters and the newest entries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvkeep.core.traits import Traits
from kvkeep.core.view import LayerView
from kvkeep.policies.ranked import RankedPolicy


@dataclass(frozen=True, kw_only=True)
class H2O(RankedPolicy):
    """Keep the entries that received the most attention so far, and the newest ones.

    Attention is summed up over every query since an entry was stored. A few entries collect most of it;
    half of the budget goes to them, the other half to the newest entries, which had no time to collect.

    Parameters
    ----------
    budget
        Entries kept per KV head and layer.
    buffer
        Tokens between evictions.
    recent_window
        Newest entries always kept; ``None`` is half the budget (paper), and at least the buffer.
    average
        Divide each sum by the number of queries that could see the entry, so that age alone earns nothing
        (the form of kvpress).

    Source
    ------
    H2O, arXiv 2306.14048; ``average`` after the observed attention of kvpress.

    Deviations
    ----------
    Query heads that share a KV head are averaged (the paper has one query head for each). Evicts every
    ``buffer`` tokens; ``buffer=1`` is the paper's every-step form. Logits are divided by sqrt(head_dim)
    also in models that scale them otherwise, and learned sinks take no share.

    Notes
    -----
    The sums are exact: attention probabilities are computed from the recorded queries once per eviction,
    while everything that those queries saw is still stored, so any attention back end serves.

    Examples
    --------
    >>> H2O(budget=1024).recent
    512
    """

    name: ClassVar[str] = "h2o"
    mass: ClassVar[bool] = True
    recent_option: ClassVar[str] = "recent_window"

    recent_window: int | None = None
    average: bool = False

    def __post_init__(self) -> None:
        self._require(
            self.recent_window is None or self.recent_window >= 1,
            f"recent_window {self.recent_window} is below 1 token",
        )
        super().__post_init__()

    @property
    def traits(self) -> Traits:
        return Traits(trigger=self._make_trigger(), queries=self.buffer, attention_sum=True)

    @property
    def recent(self) -> int:
        """The recent window: half the budget, or as given."""
        if self.recent_window is not None:
            return self.recent_window
        return max(self.buffer, self.amount.count // 2) if self.amount.resolved else self.buffer

    def score(self, view: LayerView) -> Tensor:
        """Attention received so far."""
        if not self.average:
            return view.attention_sum
        queries = view.seq_lens[:, None, None] - view.positions
        return view.attention_sum / queries.clamp(min=1)
