"""A bounded cache told entry by entry: what the arithmetic of serving/schedule.py has to amount to."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvkeep.serving.schedule import Schedule


@dataclass
class NaiveRow:
    """One request and one KV head, with a real list of what stands where.

    Parameters
    ----------
    schedule
        Budget, buffer, size of blocks, handling of the prompt: nothing else of it is asked.
    prompt_len
        Tokens of the prompt.
    """

    schedule: Schedule
    prompt_len: int
    seen: int = 0
    evictions: int = 0
    entries: list[int] = field(default_factory=list)  # positions, by slot; -1 for an old entry that stayed

    @property
    def limit(self) -> int:
        """Entries that stay at an eviction."""
        given, size = self.schedule, self.schedule.block_size
        blocks = 0
        while blocks * size < self.prompt_len:
            blocks += 1
        return given.budget + (blocks * size if given.prompt == "kept" else 0)

    @property
    def due(self) -> bool:
        """Whether an eviction happens before the next token."""
        above = len(self.entries) - self.limit
        if above < self.schedule.buffer or above % self.schedule.buffer:
            return False
        # A deferred prompt waits for a step of one token, and that is the first generated one.
        return self.schedule.prompt != "defer" or self.seen > self.prompt_len

    def read(self) -> tuple[bool, int]:
        """Read one token: whether an eviction came first, and the token's slot."""
        evicts = self.due
        if evicts:
            self.entries = [-1] * self.limit
            self.evictions += 1
        self.entries.append(self.seen)
        self.seen += 1
        return evicts, len(self.entries) - 1

    @property
    def held(self) -> int:
        """Entries now, a due eviction counted as done."""
        return self.limit if self.due else len(self.entries)
