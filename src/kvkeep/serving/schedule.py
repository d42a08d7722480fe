"""Where a token stands in a bounded cache: arithmetic that scheduler and worker share, and nothing else.

A request keeps ``kept`` entries per KV head and evicts whenever it has ``kept + buffer``. Its first eviction
happens just before token ``first`` is stored, every later one ``buffer`` tokens after the last:

    slot(p) = p                                   while p < first
            = kept + (p - kept) % buffer          afterwards

so what a request owns follows from its logical length alone. Scheduler and worker need not talk, and chunks
of a prompt, neighbours in the batch, a preemption or steps in flight change nothing.

How much of the prompt stays is the one thing that the worker must be told (vLLM does not). It is read off the
number of blocks that a row owns, which the scheduler sets before the first token and never changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvkeep.core.arrays import IntArray
from kvkeep.core.errors import ConfigError

#: ``"chunk"``: a prompt above the budget is evicted while it is read. ``"defer"``: it is read whole, and
#: evicted at the first multiple of the buffer after its end. ``"kept"``: it stays, on top of the budget.
PromptHandling = Literal["chunk", "defer", "kept"]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Slots, evictions and blocks of a request.

    Parameters
    ----------
    budget, buffer
        Entries kept per KV head after an eviction, and tokens between evictions.
    block_size
        Slots of a block.
    prompt
        What happens to prompts (see :data:`PromptHandling`).
    side_blocks
        Blocks that a request owns in front of its slots, for what the policy records.
    spare
        Slots beyond budget and buffer: where heads differ in length, each may leave a page partly empty.
    max_len
        Longest sequence; a request owns no blocks beyond it where prompts are evicted while read.

    Raises
    ------
    ConfigError
        If the number of blocks could not tell the length of a prompt.

    Examples
    --------
    >>> Schedule(budget=96, buffer=32, block_size=32).slot(130, kept=96, first=128)
    98
    """

    budget: int
    buffer: int
    block_size: int
    prompt: PromptHandling = "chunk"
    side_blocks: int = 0
    spare: int = 0
    max_len: int | None = None

    def __post_init__(self) -> None:
        if self.prompt == "defer" and self.block_size > self.buffer:
            raise ConfigError(
                f"prefill='defer' needs blocks that are not larger than the buffer, and {self.block_size} "
                f"slots a block are more than {self.buffer}: start vLLM with --block-size of at most "
                f"{self.buffer}, raise the buffer, or use prefill='chunk'."
            )

    # -- of a prompt ------------------------------------------------------------------------------

    def kept(self, prompt_len: int) -> int:
        """Entries that stay at an eviction: the budget, and a kept prompt rounded up to whole blocks."""
        return self.budget + (self._whole(prompt_len) if self.prompt == "kept" else 0)

    def first(self, prompt_len: int) -> int:
        """Position before which the first eviction happens."""
        if self.prompt == "defer":
            # After the first generated token that ends a period, as the periodic trigger does it.
            periods = max(1, -(-(prompt_len + 1 - self.budget) // self.buffer))
            return self.budget + periods * self.buffer
        return self.kept(prompt_len) + self.buffer

    def blocks(self, prompt_len: int) -> int:
        """Blocks that a request owns from its first token on, those for recordings included."""
        if self.prompt == "chunk":
            return self.blocks_for(self.budget + self.buffer + self.spare)
        return self.side_blocks + self._count(self.first(prompt_len) + self.spare)

    def blocks_after(self, prompt_len: int) -> int:
        """Blocks that it still needs after its first eviction."""
        return self.side_blocks + self._count(self.kept(prompt_len) + self.buffer + self.spare)

    def blocks_for(self, tokens: int) -> int:
        """Blocks for so many tokens of a request that grows (only where a prompt is evicted while read)."""
        most = self.budget + self.buffer + self.spare
        return self.side_blocks + self._count(min(tokens, most, self.max_len or most))

    def longest(self, max_len: int) -> int:
        """Blocks of the largest request, one whose prompt alone has ``max_len`` tokens."""
        return self.blocks_for(max_len) if self.prompt == "chunk" else self.blocks(max_len)

    def of_rows(self, owned: IntArray) -> tuple[IntArray, IntArray]:
        """``kept`` and ``first`` of rows, from the blocks that they own.

        Parameters
        ----------
        owned
            ``[rows]``; read in the modes ``"defer"`` and ``"kept"`` only.
        """
        if self.prompt == "chunk":
            return np.full_like(owned, self.budget), np.full_like(owned, self.budget + self.buffer)
        slots = (owned - self.side_blocks) * self.block_size
        if self.prompt == "defer":
            periods = np.maximum(1, (slots - self.budget) // self.buffer)
            return np.full_like(owned, self.budget), self.budget + periods * self.buffer
        most = self._count(self.budget + self.buffer + self.spare) * self.block_size
        kept = self.budget + np.maximum(0, slots - most)
        return kept, kept + self.buffer

    # -- of a token -------------------------------------------------------------------------------

    def slot(self, position: int, *, kept: int, first: int) -> int:
        """Where a token is stored."""
        return position if position < first else kept + (position - kept) % self.buffer

    def next_cut(self, position: int, *, kept: int, first: int) -> int:
        """The first position above ``position`` before which an eviction happens."""
        return first if position < first else position + self.buffer - (position - kept) % self.buffer

    def cuts(self, position: int, *, kept: int, first: int) -> bool:
        """Whether an eviction happens before this token is stored."""
        return position >= first and (position - kept) % self.buffer == 0

    def held(self, seen: int, *, kept: int, first: int) -> int:
        """Entries after ``seen`` tokens, a due eviction counted as done."""
        return seen if seen < first else kept + (seen - kept) % self.buffer

    def _whole(self, tokens: int) -> int:
        return self._count(tokens) * self.block_size

    def _count(self, slots: int) -> int:
        return -(-slots // self.block_size)
