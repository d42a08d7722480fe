"""StreamingLLM: the first few tokens and the newest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvkeep.core.view import LayerView
from kvkeep.policies.ranked import RankedPolicy


@dataclass(frozen=True, kw_only=True)
class StreamingLLM(RankedPolicy):
    """Keep the first tokens of the sequence and the newest ones.

    Models pour attention that they do not need into the first tokens, whatever these say; without them
    the text falls apart. With them, a window of the newest tokens stays fluent for ever, but forgets
    everything older.

    Parameters
    ----------
    budget
        Entries kept per KV head and layer, sinks included.
    buffer
        Tokens between evictions (at most the window that is kept).
    sinks
        First tokens always kept (paper: 4).

    Source
    ------
    StreamingLLM, arXiv 2309.17453.

    Deviations
    ----------
    Keys keep the rotation of their place in the text; the paper's own code numbers the entries anew inside
    the cache. The window is cut every ``buffer`` tokens instead of every token (``buffer=1``).

    Examples
    --------
    >>> StreamingLLM(budget=1024).sinks
    4
    """

    name: ClassVar[str] = "streaming-llm"

    sinks: int = 4

    def score(self, view: LayerView) -> Tensor:
        """The position: newer is better."""
        return view.positions.float()
