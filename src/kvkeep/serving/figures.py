"""What one request held and lost, from its length alone."""

from __future__ import annotations

from dataclasses import dataclass

from kvkeep.serving.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class RequestFigures:
    """The cache of one finished request, per KV head of a managed layer.

    Parameters
    ----------
    steps
        Decode steps: the first generated token comes out of the prompt, every further one costs a step.
    mean
        Mean over the decode steps of the entries held after the step, a due eviction counted as done; without
        a decode step, the entries held after the prompt.
    peak
        Most entries that were attended to at once.
    evictions, evicted
        Evictions carried out, and entries that they dropped. An eviction that was due at the end never ran.
    """

    steps: int
    mean: float
    peak: int
    evictions: int
    evicted: int

    @classmethod
    def of(cls, schedule: Schedule, *, prompt: int, generated: int) -> RequestFigures:
        """The figures of a request.

        Preemptions do not show: what is read again is evicted again, and counted once here.

        Parameters
        ----------
        prompt, generated
            Tokens of the prompt, and tokens written after it.

        Examples
        --------
        >>> RequestFigures.of(Schedule(budget=96, buffer=32, block_size=32), prompt=128, generated=65)
        RequestFigures(steps=64, mean=111.5, peak=128, evictions=2, evicted=64)
        """
        kept, first, buffer = schedule.kept(prompt), schedule.first(prompt), schedule.buffer
        # The last token is sampled and never stored.
        stored = prompt + max(0, generated - 1)
        steps = stored - prompt
        total = _held_below(stored + 1, kept, first, buffer) - _held_below(prompt + 1, kept, first, buffer)
        evictions = 0 if stored <= first else 1 + (stored - 1 - first) // buffer
        return cls(
            steps=steps,
            mean=total / steps if steps else float(schedule.held(stored, kept=kept, first=first)),
            peak=min(stored, first),
            evictions=evictions,
            evicted=(first - kept) + (evictions - 1) * buffer if evictions else 0,
        )


def _held_below(bound: int, kept: int, first: int, buffer: int) -> int:
    """Sum of :meth:`Schedule.held` over ``seen`` in ``[0, bound)``, without a loop."""
    early = min(bound, first)
    total = early * (early - 1) // 2
    late = bound - early
    # From ``first`` on the entries run kept … kept + buffer - 1 in turn.
    rounds, rest = divmod(late, buffer)
    return total + late * kept + rounds * (buffer * (buffer - 1) // 2) + rest * (rest - 1) // 2
