"""Quest: read the pages whose keys could match the query best."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvkeep.core.selector import ReadView, Selector
from kvkeep.core.traits import Reads
from kvkeep.scoring.block_bound import block_bound


@dataclass(frozen=True, kw_only=True)
class Quest(Selector):
    """Keep everything, and read the pages whose keys could match the query best.

    Of each page of keys the smallest and the largest number in every channel are kept. Their products with
    the query bound every logit of the page from above. Each query head reads the pages of the highest bounds,
    with exact attention.

    Parameters
    ----------
    token_budget
        Entries that a query head reads in a step, in whole pages (paper: 256 to 4,096).
    page
        Entries of a page.
    least_pages
        Pages that are read at least.
    dense_layers
        First layers that read everything.
    budget, buffer, sinks, trigger, prefill
        Accepted and ignored: nothing is evicted.

    Source
    ------
    Quest, arXiv 2406.10774; official code mit-han-lab/Quest.

    Deviations
    ----------
    The newest page is always among those that are read, as in the kernels of the code; its evaluation script
    lets it compete. Pages are counted from the first entry of the sequence.

    Notes
    -----
    Memory is that of the full cache and two keys per page more. The prompt, and several tokens at once, are
    read densely. Query heads of one KV head choose alone, so that a KV head is read in more places than one
    of them reads: the measured ``read`` counts each entry of a KV head once.

    Examples
    --------
    >>> Quest(token_budget=128).blocks_read
    8
    """

    name: ClassVar[str] = "quest"

    page: int = 16
    least_pages: int = 3
    dense_layers: int = 2

    def __post_init__(self) -> None:
        self._require(self.least_pages >= 1, f"least_pages {self.least_pages} is below 1 page")
        super().__post_init__()

    @property
    def reads(self) -> Reads:
        return Reads(block=self.page, chosen_by="query", bounds=True, dense_layers=self.dense_layers)

    @property
    def blocks_read(self) -> int:
        """Pages that fit the token budget."""
        return max(self.least_pages, self.token_budget // self.page)

    def rate(self, view: ReadView) -> Tensor:
        """Upper bound of the logits of each page, per query head."""
        return block_bound(view.queries, view.low, view.high)
