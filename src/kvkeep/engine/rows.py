"""Where each sequence of the batch stands: the state that all layers of a cache share."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvkeep.core.errors import CacheError, ConfigError

_PER_ROW = ("seq_lens", "prompt_lens", "sequence_ids", "evicted_at", "demoted_at", "entropy")


@dataclass
class Rows:
    """Host numbers only; one list entry per row of the batch.

    Parameters
    ----------
    seq_lens, prompt_lens
        Tokens seen, and those of them that arrived before the first generated token.
    sequence_ids
        Names of the rows for the random source.
    evicted_at
        Tokens seen at the row's last eviction (0: none yet).
    entropy
        Nats of the distribution that each row's next token is drawn from, where somebody said so.
    demoted_at
        Tokens seen when entries of the row were last written down in few bits (0: never).
    columns
        Columns seen, padding included: what transformers derives positions from.
    reading_prompt
        No token has been generated yet.
    prompt_waits
        A prompt has been read and is to be evicted before the next token is stored.
    """

    seq_lens: list[int] = field(default_factory=list)
    prompt_lens: list[int] = field(default_factory=list)
    sequence_ids: list[int] = field(default_factory=list)
    evicted_at: list[int] = field(default_factory=list)
    entropy: list[float] = field(default_factory=list)
    demoted_at: list[int] = field(default_factory=list)
    columns: int = 0
    reading_prompt: bool = True
    prompt_waits: bool = False

    @property
    def started(self) -> bool:
        """Whether every row has seen a token."""
        return bool(self.seq_lens) and all(self.seq_lens)

    def admit(self, batch: int, ids: Sequence[int] | None) -> None:
        """Take the rows of the first forward, or check that a later one has as many.

        Raises
        ------
        CacheError
            If the batch changed.
        ConfigError
            If there are more or fewer ids than rows.
        """
        if not self.seq_lens:
            chosen = list(range(batch)) if ids is None else list(ids)
            if len(chosen) != batch:
                raise ConfigError(f"{len(chosen)} sequence_ids were given for a batch of {batch} sequences.")
            self.sequence_ids = chosen
            self.seq_lens, self.prompt_lens, self.evicted_at = [0] * batch, [0] * batch, [0] * batch
            self.demoted_at = [0] * batch
        if batch != len(self.seq_lens):
            raise CacheError(
                f"this cache holds {len(self.seq_lens)} sequences and was given {batch}: use one cache "
                "per batch (cache.reset() empties it)."
            )

    def advance(self, fresh: Sequence[int], query_len: int) -> None:
        """Count the real new tokens of a forward."""
        if self.started and query_len == 1:
            self.reading_prompt = False
        self.seq_lens = [seen + new for seen, new in zip(self.seq_lens, fresh, strict=True)]
        if self.reading_prompt:
            self.prompt_lens = list(self.seq_lens)

    def select(self, index: Sequence[int]) -> None:
        """Keep the rows ``index``, in that order, repeats allowed."""
        for name in _PER_ROW:
            values = getattr(self, name)
            if values:
                setattr(self, name, [values[row] for row in index])

    def demoted(self, rows: Sequence[int]) -> None:
        """Note that entries of some rows are written down in few bits now."""
        for row in rows:
            self.demoted_at[row] = self.seq_lens[row]

    def lens_without(self, removed: int) -> list[int]:
        """Tokens seen per row, were the newest ``removed`` forgotten.

        Raises
        ------
        CacheError
            If that reaches back past an eviction, or past a rounding to few bits: what is gone is gone.
        """
        lens = [seen - removed for seen in self.seq_lens]
        if any(length < max(evicted, 0) for length, evicted in zip(lens, self.evicted_at, strict=True)):
            raise CacheError(
                f"cannot crop {removed} tokens: the last eviction happened after "
                f"{max(self.evicted_at, default=0)} tokens, and what it evicted is gone. Crop less, or "
                "evict less often (a larger budget or buffer)."
            )
        if any(length < before for length, before in zip(lens, self.demoted_at, strict=False)):
            raise CacheError(
                f"cannot crop {removed} tokens: after {max(self.demoted_at)} tokens entries were "
                "written down in few bits, and what they lost is gone. Crop less, or round less often (a "
                "larger buffer)."
            )
        return lens

    def crop(self, removed: int) -> None:
        """Forget the newest ``removed`` tokens of every row."""
        self.seq_lens, self.columns = self.lens_without(removed), self.columns - removed
        self.entropy = []
        if self.reading_prompt:
            self.prompt_lens = list(self.seq_lens)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready; ``Rows(**rows.as_dict())`` is equal."""
        return dataclasses.asdict(self)
