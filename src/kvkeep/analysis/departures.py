"""What an eviction takes away: how large, how old and where from. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.analysis.spread import SINKS

#: One part in so many of the candidates of a head, the largest ranges, counts as large.
LARGE_PARTS = 10


@dataclass(frozen=True, kw_only=True)
class Departures:
    """Sums over the entries that one sequence loses in one eviction, or in several layers of it.

    Parameters
    ----------
    entries
        How many go.
    places
        Sum of the places of their value ranges among the candidates of their head: 0 for the smallest,
        1 for the largest, so that a random choice has one half on average
        (a lone candidate is put in the middle).
    large
        Those among the largest tenth of the ranges.
    candidates, large_candidates
        Entries that could have gone, and those of them in that tenth.
    age
        Sum of the tokens since each was read or written.
    prompt, sinks
        Those of the prompt, and those among the first four positions.
    """

    entries: float
    places: float
    large: float
    candidates: float
    large_candidates: float
    age: float
    prompt: float
    sinks: float

    def __add__(self, other: Departures) -> Departures:
        return Departures(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    def facts(self) -> Mapping[str, float]:
        """Means over the entries that go; shares of all that could, ready for JSON.

        ``range`` is the mean place, ``large`` the share of the departures that is large, ``large_lost`` the
        share of the large ones that goes and ``lost`` that of all candidates.
        """
        count = max(self.entries, 1.0)
        numbers = {
            "range": self.places / count,
            "large": self.large / count,
            "large_lost": self.large / max(self.large_candidates, 1.0),
            "lost": self.entries / max(self.candidates, 1.0),
            "age": self.age / count,
            "prompt": self.prompt / count,
            "sinks": self.sinks / count,
        }
        return {"entries": int(self.entries), **{name: round(value, 4) for name, value in numbers.items()}}


def departures(
    ranges: Tensor, positions: Tensor, candidates: Tensor, evicted: Tensor, *, seen: int, prompt: int
) -> Departures:
    """Sum up what one layer of one sequence loses.

    Parameters
    ----------
    ranges
        Value ranges, ``[kv_heads, entries]``.
    positions
        Where each entry stood, same shape.
    candidates, evicted
        bool, same shape: entries that could go, and those that do.
    seen
        Tokens of the sequence so far.
    prompt
        Those of them that are its prompt.
    """
    rank, last = ranks(ranges, candidates)
    place = torch.where(last > 0, rank / last.clamp(min=1), 0.5)
    # In whole numbers: a tenth that hangs on rounding would not be the same on every machine.
    large = candidates & (LARGE_PARTS * rank > (LARGE_PARTS - 1) * last)

    def total(numbers: Tensor) -> float:
        return float(numbers.double().sum())

    return Departures(
        entries=total(evicted),
        places=total(place * evicted),
        large=total(large & evicted),
        candidates=total(candidates),
        large_candidates=total(large),
        age=total((seen - 1 - positions) * evicted),
        prompt=total(evicted & (positions < prompt)),
        sinks=total(evicted & (positions < SINKS)),
    )


def ranks(ranges: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor]:
    """Rank of each entry among the candidates of its head, and the last rank.

    Returns
    -------
    tuple
        int64, shape as given: 0 for the smallest range, equal ones in the order of their slots (entries that
        are no candidates come after all others); and int64 ``[..., 1]``, -1 without a candidate.
    """
    order = torch.where(candidates, ranges.float(), torch.inf).sort(dim=-1, stable=True).indices
    rank = torch.empty_like(order).scatter_(-1, order, torch.arange(order.shape[-1]).expand_as(order))
    return rank, candidates.sum(-1, keepdim=True) - 1
