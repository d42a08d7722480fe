"""The contract of a selector: everything stays in memory, and each step reads a part of it.

A selector is named, built and configured like a policy, and it evicts nothing. Before each decode step it
looks at a :class:`ReadView`, which says something of every block of stored entries, and answers with a
:class:`ReadDecision`: the blocks that attention reads in this step. Memory grows as with the full cache; what
shrinks is the reading. So a fair table has two columns, entries stored and entries read.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.core.budget import Budget
from kvkeep.core.decision import KeepCounts, KeepDecision
from kvkeep.core.errors import BudgetError, ConfigError
from kvkeep.core.policy import Policy
from kvkeep.core.traits import DecodeTrigger, Reads, Traits
from kvkeep.core.view import LayerView

_NEEDS = {"low": "bounds", "high": "bounds", "gate_logits": "gates"}
#: The budget of a policy that keeps everything.
EVERYTHING = 1 << 30


@dataclass(frozen=True, kw_only=True)
class ReadView:
    """What a selector may look at: the queries of a decode step, and the blocks of stored entries.

    The new token is stored already. Block ``j`` holds entries ``j * block`` to ``(j + 1) * block - 1``.

    Parameters
    ----------
    layer
        Index of the layer in the model.
    queries
        ``[batch, heads, head_dim]`` rotated; a product with a key over sqrt(head_dim) is the model's logit.
    lens
        int64 ``[batch]``: entries stored, the new token among them.
    blocks
        Blocks of the longest sequence.
    kv_heads
        Of the layer.
    reads
        What the selector declared.
    recorded
        What it asked for, by name.
    """

    layer: int
    queries: Tensor
    lens: Tensor
    blocks: int
    kv_heads: int
    reads: Reads
    recorded: dict[str, Tensor] = field(default_factory=dict)

    @property
    def newest(self) -> Tensor:
        """bool ``[batch, 1, blocks]``: the block that holds the newest entry."""
        last = (self.lens - 1).div(self.reads.block, rounding_mode="floor")
        return (torch.arange(self.blocks, device=self.lens.device) == last[:, None])[:, None]

    @property
    def stored(self) -> Tensor:
        """bool ``[batch, 1, blocks]``: holds an entry at all."""
        first = torch.arange(self.blocks, device=self.lens.device) * self.reads.block
        return (first < self.lens[:, None])[:, None]

    @property
    def complete(self) -> Tensor:
        """bool ``[batch, 1, blocks]``: full, so that it will not change any more."""
        end = (torch.arange(self.blocks, device=self.lens.device) + 1) * self.reads.block
        return (end <= self.lens[:, None])[:, None]

    def _read(self, name: str) -> Tensor:
        if not getattr(self.reads, _NEEDS[name]):
            raise ConfigError(
                f"the selector reads view.{name} but its traits do not declare Reads({_NEEDS[name]}=True), "
                "so it was not recorded: declare it."
            )
        return self.recorded[name]

    @property
    def low(self) -> Tensor:
        """``[batch, kv_heads, blocks, head_dim]``: smallest of the keys in each channel; inf in no block."""
        return self._read("low")

    @property
    def high(self) -> Tensor:
        """``[batch, kv_heads, blocks, head_dim]``: largest of the keys in each channel; -inf in no block."""
        return self._read("high")

    @property
    def gate_logits(self) -> Tensor:
        """float32 ``[batch, kv_heads, blocks]``: what block gates say; anything at blocks not complete."""
        return self._read("gate_logits")


@dataclass(frozen=True)
class ReadDecision:
    """Which blocks are read.

    Parameters
    ----------
    blocks
        int64 ``[batch, heads or kv_heads, most]``, ascending within each head; beyond ``lengths`` the content
        is arbitrary but in range.
    lengths
        int64 ``[batch, heads or kv_heads]``, at least 1.
    """

    blocks: Tensor
    lengths: Tensor

    @classmethod
    def from_mask(cls, read: Tensor, most: int | None = None) -> ReadDecision:
        """Turn a mask ``[batch, heads, blocks]`` into ascending indices.

        Parameters
        ----------
        most
            Most blocks that any head reads, where that is known without looking at the device.
        """
        lengths = read.sum(-1)
        width = int(lengths.max()) if most is None else most
        # Sorting is stable, so that the blocks to read come first and in order.
        order = (~read).to(torch.int8).sort(dim=-1, stable=True).indices
        return cls(order[..., :width], lengths)


@dataclass(frozen=True, kw_only=True)
class Selector(Policy):
    """Base of all selectors.

    Parameters
    ----------
    token_budget
        Entries that a head reads in a step, in whole blocks; at least one block is read.
    dense_layers
        First layers that read everything.
    budget, buffer, sinks, trigger, prefill
        Accepted and ignored: nothing is evicted.

    Raises
    ------
    BudgetError
        If less than one block would be read.
    """

    bounded: ClassVar[bool] = False

    token_budget: int = 1024
    dense_layers: int = 0
    budget: int | Budget = EVERYTHING
    trigger: DecodeTrigger = "never"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.dense_layers >= 0, f"dense_layers {self.dense_layers} is negative")
        self._require(self.reads.block >= 1, f"blocks of {self.reads.block} entries hold nothing")
        if self.token_budget < self.reads.block:
            raise BudgetError(
                f"{self.name}: a token budget of {self.token_budget} is less than one block of "
                f"{self.reads.block} entries: give a token_budget of at least {self.reads.block}."
            )

    def _check_budget(self, entries: int) -> None:
        """Any budget will do."""

    @property
    @abstractmethod
    def reads(self) -> Reads:
        """What the engine must keep per block."""

    @property
    def traits(self) -> Traits:
        return Traits(trigger=self._make_trigger(), reads=self.reads, trained=self.reads.gates)

    @property
    def request(self) -> str:
        """What was asked for, in words."""
        return f"everything stored, {self.token_budget} entries read"

    @property
    def blocks_read(self) -> int:
        """Blocks that a head reads in a step, if there are so many."""
        return max(1, self.token_budget // self.reads.block)

    def reads_all(self, entries: int) -> bool:
        """Whether a sequence of so many entries is read as a whole."""
        return entries <= self.blocks_read * self.reads.block

    @abstractmethod
    def rate(self, view: ReadView) -> Tensor:
        """How much each block promises, float32 ``[batch, heads or kv_heads, blocks]``, larger = read.

        What stands at blocks that hold nothing, or are read in any case, is ignored.
        """

    def always(self, view: ReadView) -> Tensor:
        """bool ``[batch, 1, blocks]``: blocks that are read whatever they promise."""
        return view.newest

    def choose(self, view: ReadView) -> ReadDecision:
        """Read what is always read, and the best of the rest up to :attr:`blocks_read`."""
        count, rates = min(self.blocks_read, view.blocks), self.rate(view).float()
        stored, always = view.stored, self.always(view)
        # NOTE: not by inf in the rates: a rate may be infinite itself, and NaN where a block is empty.
        rank = torch.where(always, 2.0, torch.where(stored, 1.0, 0.0)).expand_as(rates)
        rates = rates.masked_fill(~stored | always, 0.0)
        by_rate = rates.argsort(dim=-1, descending=True, stable=True)
        by_rank = rank.gather(-1, by_rate).argsort(dim=-1, descending=True, stable=True)
        chosen = by_rate.gather(-1, by_rank)[..., :count]
        read = torch.zeros_like(rates, dtype=torch.bool).scatter_(-1, chosen, True) & stored
        return ReadDecision.from_mask(read, count)

    def score(self, view: LayerView) -> Tensor:
        """Nothing is evicted."""
        raise ConfigError(f"{self.name} evicts nothing and scores no entry: it rates blocks to read.")

    def select(self, view: LayerView, scores: Tensor, counts: KeepCounts) -> KeepDecision:
        """Nothing is evicted."""
        raise ConfigError(f"{self.name} evicts nothing: it chooses blocks to read.")
