"""RaaS: pages of the answer that have not been attended to for longest go first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.core.traits import Traits
from kvkeep.core.view import LayerView
from kvkeep.policies.ranked import RankedPolicy


@dataclass(frozen=True, kw_only=True)
class RaaS(RankedPolicy):
    """Keep the prompt, and of the answer the pages that were attended to last.

    Milestones of a chain of reasoning are attended to for a while and then never again; the prompt may be
    needed at any time. Each page of the answer carries the time when any of its entries was last attended to,
    and the page with the oldest time goes first.

    Parameters
    ----------
    budget
        Entries kept per KV head and layer.
    buffer
        Newest entries always kept, and tokens between evictions.
    page
        Tokens of a page (paper: 16).
    threshold
        Attention above which an entry counts as attended to, ``alpha`` (paper: 1e-4).
    protect_prompt
        Keep every entry of the prompt, whatever its time.

    Source
    ------
    RaaS, arXiv 2502.11147.

    Deviations
    ----------
    Attention is exact, where the paper estimates it by a page's bounds. Pages are counted from the first
    entry of the sequence, so that the first page of the answer may hold the end of the prompt. The budget is
    met exactly, so of the oldest page that stays the newest entries may go. Evicts every ``buffer`` tokens.

    Notes
    -----
    A cache cannot be cropped past queries that were worked out.

    Examples
    --------
    >>> RaaS(budget=1024).protects_prompt
    True
    """

    name: ClassVar[str] = "raas"

    page: int = 16
    threshold: float = 1e-4
    protect_prompt: bool = True

    def __post_init__(self) -> None:
        self._require(self.page >= 1, f"page {self.page} is below 1 token")
        self._require(0 < self.threshold < 1, f"threshold {self.threshold} is outside (0, 1)")
        super().__post_init__()

    @property
    def traits(self) -> Traits:
        return Traits(trigger=self._make_trigger(), queries=self.buffer, recurrence=self.threshold)

    @property
    def protects_prompt(self) -> bool:
        """As asked, or as the budget says."""
        return self.protect_prompt or super().protects_prompt

    def score(self, view: LayerView) -> Tensor:
        """The last time that any entry of the same page was attended to."""
        pages = view.positions // self.page
        latest = torch.full_like(view.last_attended, -1.0)
        times = view.last_attended.masked_fill(~view.valid, -1.0)
        # Pages are numbered by position; a head's entries are fewer than its positions, so rank the pages.
        first = torch.zeros_like(pages, dtype=torch.bool)
        first[..., 1:] = pages[..., 1:] != pages[..., :-1]
        place = first.cumsum(-1)
        latest = latest.scatter_reduce(-1, place, times, "amax")
        return latest.gather(-1, place)
