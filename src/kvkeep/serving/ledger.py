"""What a worker measured: entries held and evictions done, counted from the rounds that it carried out."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kvkeep.core.arrays import BoolArray, IntArray
from kvkeep.serving.schedule import Schedule

if TYPE_CHECKING:
    from kvkeep.serving.rounds import Round

#: Forwards that are added up at once: one sum over many costs what one over a single step does.
_TOGETHER = 64


@dataclass
class Ledger:
    """Running sums of one worker; :class:`LedgerReader` is how they are asked for from outside.

    Parameters
    ----------
    schedule, layers
        Of the engine that the worker runs; ``None`` before there is one.
    steps
        Decode steps of requests (one token of one request each, after its prompt was read).
    entries
        Sum over them of the entries held per KV head while the step attended: its token stored, an eviction
        that the token makes due not yet done.
    peak
        Most entries that a head held, while prompts were read too.
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
    #: Forwards not added up yet, by row: entries held, tokens read, how many just now, still at its prompt.
    _waiting: list[tuple[IntArray, IntArray, IntArray, BoolArray]] = field(default_factory=list, repr=False)

    def open(self, schedule: Schedule | None, layers: int = 0) -> None:
        """Begin for an engine (``None``: for one without kvkeep)."""
        self.schedule, self.layers = schedule, layers
        self.reset()

    def reset(self) -> None:
        """Forget what was counted."""
        self.steps = self.entries = self.peak = self.evictions = self.evicted = 0
        self._waiting.clear()

    def note(
        self, lens: IntArray, counts: IntArray, rounds: list[Round], reading: BoolArray | None = None
    ) -> None:
        """Count one forward.

        Parameters
        ----------
        lens, counts
            int ``[rows]``: tokens read when it is done, and those that it reads.
        rounds
            How they were carried out.
        reading
            bool ``[rows]``: the row is still at its prompt, whose last piece may be a single token. A request
            that goes on after a preemption reads its answer again in pieces: no decode steps either.
        """
        for one in rounds:
            self.peak = max(self.peak, one.longest)
            if one.cuts is not None:
                self.evictions += len(one.cuts.seen)
                self.evicted += one.evicted
        # Every row with tokens has its first piece in the first round, and a decode step has no other piece.
        held = rounds[0].lens_cpu.numpy() if rounds else lens[:0]
        if reading is None:
            reading = np.zeros(len(lens), dtype=bool)
        if len(held) != len(lens):
            some = counts > 0
            lens, counts, reading = lens[some], counts[some], reading[some]
        # Copies, because vLLM writes the next step into the same memory.
        self._waiting.append((held.copy(), lens.copy(), counts, reading.copy()))
        if len(self._waiting) == _TOGETHER:
            self._add_up()

    def _add_up(self) -> None:
        if not self._waiting:
            return
        held, lens, counts, reading = (np.concatenate(each) for each in zip(*self._waiting, strict=True))
        self._waiting.clear()
        decode = (counts == 1) & (lens > 1) & ~reading
        self.steps += int(decode.sum())
        self.entries += int(held[decode].sum(dtype=np.int64))

    def read(self) -> dict[str, Any]:
        """JSON-ready."""
        self._add_up()
        return {
            "schedule": None if self.schedule is None else asdict(self.schedule),
            "layers": self.layers,
            "steps": self.steps,
            "entries": self.entries,
            "mean_entries": self.entries / self.steps if self.steps else 0.0,
            "peak_entries": self.peak,
            "evictions": self.evictions,
            "evicted": self.evicted,
        }


#: One worker process serves one engine.
LEDGER = Ledger()


class LedgerReader:
    """Methods for vLLM's ``worker_extension_cls``, so that ``collective_rpc`` finds them in any process."""

    def kvkeep_ledger(self) -> dict[str, Any]:
        """What this worker counted since the last reset."""
        return LEDGER.read()

    def kvkeep_reset(self) -> None:
        """Begin to count again."""
        LEDGER.reset()
