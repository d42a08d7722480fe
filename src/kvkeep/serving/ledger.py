"""What a worker measured: entries held and evictions done, counted from the rounds that it carried out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvkeep.core.arrays import IntArray
from kvkeep.serving.schedule import Schedule

if TYPE_CHECKING:
    from kvkeep.serving.rounds import Round


@dataclass
class Ledger:
    """Running sums of one worker; :meth:`read` and :meth:`reset` are called through ``collective_rpc``.

    Parameters
    ----------
    steps
        Decode steps of requests (one token of one request each).
    entries
        Sum over them of the entries held after the step, a due eviction counted as done.
    peak
        Most entries that a head held.
    evictions
        Evictions of requests (a round over all layers counts once).
    evicted
        Entries evicted per KV head, summed over requests.
    """

    schedule: Schedule | None = None
    layers: int = 0
    steps: int = 0
    entries: int = 0
    peak: int = 0
    evictions: int = 0
    evicted: int = 0

    def open(self, schedule: Schedule, layers: int) -> None:
        """Begin for an engine."""
        self.schedule, self.layers = schedule, layers
        self.reset()

    def reset(self) -> None:
        """Forget what was counted."""
        self.steps = self.entries = self.peak = self.evictions = self.evicted = 0

    def note(self, starts: IntArray, counts: IntArray, rounds: list[Round]) -> None:
        """Count one forward."""
        assert self.schedule is not None
        buffer = self.schedule.buffer
        decode = (counts == 1) & (starts > 0)
        for one in rounds:
            self.peak = max(self.peak, one.longest)
            if one.cuts is not None:
                self.evictions += len(one.cuts.seen)
                self.evicted += int((one.cuts.held - one.cuts.kept).sum())
        if len(rounds) == 1 and decode.any():
            held = rounds[0].seq_lens.cpu().numpy().astype(np.int64)
            # The eviction that this step made due is done before the row's next token.
            kept, first = self.schedule.of_rows(np.zeros_like(starts))
            due = (starts + 1 >= first) & ((starts + 1 - kept) % buffer == 0)
            self.steps += int(decode.sum())
            self.entries += int(np.where(due, kept, held)[decode].sum())

    def read(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "steps": self.steps,
            "mean_entries": self.entries / self.steps if self.steps else 0.0,
            "peak_entries": self.peak,
            "evictions": self.evictions,
            "evicted": self.evicted,
        }


#: One worker process serves one engine.
LEDGER = Ledger()
