"""LazyEviction: keep what may be due to be attended to again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.core.traits import Traits
from kvkeep.core.view import LayerView
from kvkeep.policies.ranked import RankedPolicy


@dataclass(frozen=True, kw_only=True)
class LazyEviction(RankedPolicy):
    """Keep the entries that may be due to be attended to again.

    Reasoning comes back to an entry after a pause. For each entry the engine notes when it was last attended
    to, and the longest pause that it has come back from. An entry whose present pause is longer than that is
    probably done with; one that has come back from long pauses deserves patience.

    Parameters
    ----------
    budget
        Entries kept per KV head and layer.
    buffer
        Newest entries always kept, and tokens between evictions, ``W`` (paper: 25 to 175).
    threshold
        Attention above which an entry counts as attended to, ``alpha`` (paper: 1e-4).

    Source
    ------
    LazyEviction, arXiv 2506.15969.

    Deviations
    ----------
    How the two parts of the score are put together is not known from what we have: they are added. An entry
    counts as attended to if any query head of its KV head attends to it. Entries that never came back score
    zero, and of those the oldest stay.

    Notes
    -----
    Times and pauses are exact: at each eviction they are worked out from the recorded queries, while
    everything that those saw is still stored. A cache cannot be cropped past queries that were worked out.

    Examples
    --------
    >>> LazyEviction(budget=1024).traits.recurrence
    0.0001
    """

    name: ClassVar[str] = "lazy-eviction"

    buffer: int = 175
    threshold: float = 1e-4

    def __post_init__(self) -> None:
        self._require(0 < self.threshold < 1, f"threshold {self.threshold} is outside (0, 1)")
        super().__post_init__()

    @property
    def traits(self) -> Traits:
        return Traits(trigger=self._make_trigger(), queries=self.buffer, recurrence=self.threshold)

    def score(self, view: LayerView) -> Tensor:
        """``2 sigmoid(-(t - last) / pause) + 2 sigmoid(-1 / pause)``; zero for what never came back."""
        since = (view.seq_lens - 1)[:, None, None] - view.last_attended
        pause = view.longest_pause
        back = pause > 0
        length = torch.where(back, pause, 1.0)
        score = 2 * torch.sigmoid(-since / length) + 2 * torch.sigmoid(-1 / length)
        return torch.where(back, score, 0.0)
