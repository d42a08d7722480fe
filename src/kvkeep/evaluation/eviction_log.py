"""Notes of every eviction of a batch: what went, by sequence and by the token that was written last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvkeep.analysis.departures import Departures, departures
from kvkeep.engine.eviction import Eviction
from kvkeep.scoring.value_magnitude import value_magnitude


class EvictionLog:
    """Observer of a :class:`~kvkeep.RetentionCache`: sums over layers and heads, eviction by eviction.

    An eviction is named by the tokens of the answer that are stored when it happens, ``at``: it comes after
    token ``at - 1`` was read, and what is missing can show from token ``at + 1`` on.
    """

    def __init__(self) -> None:
        self._found: dict[int, dict[int, Departures]] = {}

    def __call__(self, eviction: Eviction) -> None:
        """Note what one layer loses."""
        view, evicted = eviction.view, eviction.evicted.cpu()
        ranges = value_magnitude(view.values).cpu()
        positions, candidates = view.positions.cpu(), view.candidates.cpu()
        lengths = zip(eviction.sequence_ids, view.seq_lens.tolist(), view.prompt_lens.tolist(), strict=True)
        for row, (name, seen, prompt) in enumerate(lengths):
            lost = departures(
                ranges[row], positions[row], candidates[row], evicted[row], seen=seen, prompt=prompt
            )
            of_row = self._found.setdefault(name, {})
            at = seen - prompt
            of_row[at] = of_row[at] + lost if at in of_row else lost

    def of(self, sequence_id: int, readings: Sequence[int] = (), prompt: int = 0) -> Sequence[dict[str, Any]]:
        """What a sequence lost so far, in order of time; ready for JSON.

        ``at`` and the numbers of :meth:`~kvkeep.analysis.departures.Departures.facts`.

        Parameters
        ----------
        readings, prompt
            Tokens of the answer that were stored when each new reading of the prompt began, and the tokens of
            the prompt: stored behind the answer so far, they are no part of it.
        """
        found = sorted(self._found.get(sequence_id, {}).items())
        return [{"at": answered(stored, readings, prompt), **lost.facts()} for stored, lost in found]


def answered(stored: int, readings: Sequence[int], prompt: int) -> int:
    """Tokens of the answer among those stored behind the first prompt.

    Examples
    --------
    >>> [answered(stored, [2], 3) for stored in (1, 2, 4, 5, 6)]
    [1, 2, 2, 2, 3]
    """
    again = (stored - begun - number * prompt for number, begun in enumerate(readings))
    return stored - sum(min(prompt, max(0, each)) for each in again)
