"""What one request held, from its lengths alone: the same counts that a worker's ledger sums up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvkeep.core.errors import CacheIntegrityError, ConfigError
from kvkeep.serving.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class Account:
    """Entries per KV head of one request, as :class:`~kvkeep.engine.row_trace.RowTrace` measures them.

    Parameters
    ----------
    steps
        Decode steps: one fewer than generated tokens; the first one is chosen when the prompt is read.
    entries
        Sum over them of the entries held while the step attends: its token stored, an eviction not yet due.
    peak
        The largest of them; without a decode step, what the prompt left.
    prefill
        Entries when the prompt had been read, a due eviction counted as done.
    highest
        Most entries at any time, the reading of the prompt included.
    evictions
        Evictions that were carried out: one that falls due after the last step never is.
    evicted
        Entries that they removed from each KV head.
    """

    steps: int
    entries: int
    peak: int
    prefill: int
    highest: int
    evictions: int = 0
    evicted: int = 0

    @property
    def mean(self) -> float:
        """Mean over the decode steps; without one, what the prompt left."""
        return self.entries / self.steps if self.steps else float(self.prefill)

    @classmethod
    def of(cls, schedule: Schedule | None, *, prompt: int, generated: int) -> Account:
        """Add up one request.

        Parameters
        ----------
        schedule
            ``None`` for the full cache.
        prompt, generated
            Tokens of the prompt, and tokens that were chosen after it, an end token included.

        Raises
        ------
        ConfigError
            If a length is below 1.

        Examples
        --------
        >>> schedule = Schedule(budget=96, buffer=32, block_size=32)
        >>> Account.of(schedule, prompt=100, generated=101).mean
        112.1
        """
        if prompt < 1 or generated < 1:
            raise ConfigError(f"prompt {prompt} and generated {generated} tokens must both be at least 1.")
        steps, seen = generated - 1, prompt + generated - 1
        held = np.arange(prompt, seen) + 1  # with everything kept
        if schedule is None:
            return cls(steps=steps, entries=int(held.sum()), peak=seen, prefill=prompt, highest=seen)
        kept, first, buffer = schedule.kept(prompt), schedule.first(prompt), schedule.buffer
        held = np.where(held <= first, held, kept + (held - 1 - kept) % buffer + 1)
        prefill = schedule.held(prompt, kept=kept, first=first)
        # The first one is carried out before token `first` is stored, the next ones every `buffer` tokens.
        evictions = 1 + (seen - 1 - first) // buffer if seen > first else 0
        return cls(
            steps=steps,
            entries=int(held.sum()),
            peak=int(held.max(initial=0)) or prefill,
            prefill=prefill,
            highest=min(seen, first),
            evictions=evictions,
            evicted=(first - kept) + (evictions - 1) * buffer if evictions else 0,
        )


def require_agreement(measured: Mapping[str, Any], accounts: Sequence[Account]) -> None:
    """Hold what the workers counted against the accounts of all requests.

    Raises
    ------
    CacheIntegrityError
        Naming what differs.
    """
    due = {
        name: sum(getattr(account, name) for account in accounts)
        for name in ("steps", "entries", "evictions", "evicted")
    }
    differ = [
        f"{name} {measured[name]} and {value}" for name, value in due.items() if measured[name] != value
    ]
    highest = max((account.highest for account in accounts), default=0)
    if measured["peak_entries"] < highest:  # heads of different length may hold more than their share
        differ.append(f"peak {measured['peak_entries']} and {highest}")
    if differ:
        raise CacheIntegrityError(
            f"vLLM's workers counted otherwise than the lengths of {len(accounts)} answers say: "
            f"{'; '.join(differ)}. Requests may have been preempted: give the engine more memory, or fewer "
            "requests at once (--engine-option max_num_seqs=N)."
        )
