"""SeerAttention-R: read the blocks that a trained gate expects to be attended to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.core.selector import ReadDecision, ReadView, Selector
from kvkeep.core.traits import Reads


@dataclass(frozen=True, kw_only=True)
class SeerAttention(Selector):
    """Keep everything, and read the blocks that a trained gate expects to be attended to.

    A small gate per layer and KV head has learned, from the attention of the model itself, which blocks of
    entries a query attends to. It sees the query and the largest, smallest and mean key of each block, not
    rotated. All query heads of a KV head read the same blocks, with exact attention.

    Parameters
    ----------
    token_budget
        Entries that a KV head reads in a step, in whole blocks (paper: 1,024 to 8,192).
    threshold
        Read every block that has at least this share of the gate's softmax, and no fixed number of them;
        ``None``: as many as the token budget holds.
    block
        Entries of a block (paper: 64); the gates must have been trained with it.
    dense_layers
        First layers that read everything.
    budget, buffer, sinks, trigger, prefill
        Accepted and ignored: nothing is evicted.

    Source
    ------
    SeerAttention-R, arXiv 2506.08889; official code microsoft/SeerAttention.

    Deviations
    ----------
    The blocks that are read in any case (the first, and the newest, which is incomplete and unknown to the
    gate) count towards the token budget. With a threshold the softmax runs over complete blocks.

    Notes
    -----
    Needs block gates that were trained for the model (``kvkeep gates train-blocks``; ``gates=`` of the
    cache). Memory is that of the full cache and one vector of the gate's width per block more.

    Examples
    --------
    >>> SeerAttention(token_budget=4096).blocks_read
    64
    """

    name: ClassVar[str] = "seer-attention"

    threshold: float | None = None
    block: int = 64

    def __post_init__(self) -> None:
        given = self.threshold
        self._require(given is None or 0 < given <= 1, f"threshold {given} is outside (0, 1]")
        super().__post_init__()

    @property
    def reads(self) -> Reads:
        return Reads(block=self.block, chosen_by="kv", gates=True, dense_layers=self.dense_layers)

    @property
    def request(self) -> str:
        """What was asked for, in words."""
        if self.threshold is None:
            return super().request
        return f"everything stored, blocks from a share of {self.threshold:g} on read"

    def reads_all(self, entries: int) -> bool:
        """Whether a sequence is read as a whole: by a threshold, only if it is all first and newest block."""
        return entries <= 2 * self.block if self.threshold is not None else super().reads_all(entries)

    def always(self, view: ReadView) -> Tensor:
        """The first and the newest block."""
        first = torch.zeros_like(view.newest)
        first[..., 0] = self.blocks_read > 1 or self.threshold is not None
        return view.newest | first

    def rate(self, view: ReadView) -> Tensor:
        """What the gate says."""
        return view.gate_logits

    def choose(self, view: ReadView) -> ReadDecision:
        """The best blocks, or every block above the threshold."""
        if self.threshold is None:
            return super().choose(view)
        shares = self.rate(view).masked_fill(~view.complete, float("-inf")).softmax(-1)
        return ReadDecision.from_mask((shares >= self.threshold) | self.always(view))
