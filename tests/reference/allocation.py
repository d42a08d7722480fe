"""Allocation written out head by head (methods 6.6, 7.6, 7.7), in plain Python numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class Head:
    """One head of one sequence: what it holds, oldest first."""

    layer: int
    share: int
    scores: list[float]
    positions: list[int]
    protected: list[bool]

    @property
    def size(self) -> int:
        """Entries held."""
        return len(self.scores)

    @property
    def guarded(self) -> int:
        """Protected entries."""
        return sum(self.protected)


def total(heads: Sequence[Head]) -> int:
    """What there is to share out."""
    wanted = min(sum(head.share for head in heads), sum(head.size for head in heads))
    return max(wanted, sum(head.guarded for head in heads))


def candidates(heads: Sequence[Head]) -> list[tuple[float, int, int, int]]:
    """Entries that compete, best first: (-score, position, number of the head, index)."""
    return sorted(
        (-score, position, number, index)
        for number, head in enumerate(heads)
        for index, (score, position, guarded) in enumerate(
            zip(head.scores, head.positions, head.protected, strict=True)
        )
        if not guarded
    )


def winners(heads: Sequence[Head], slots: int) -> list[int]:
    """How many of the best ``slots`` entries each head has."""
    best = candidates(heads)[: max(0, slots)]
    return [sum(number == mine for _, _, number, _ in best) for mine in range(len(heads))]


def whole_model(heads: Sequence[Head], floors: Sequence[int]) -> list[int]:
    """Each head's floor from its own best, as far as the total goes, then the best of all others."""
    counts = [head.guarded for head in heads]
    secured = []
    for number, (head, floor) in enumerate(zip(heads, floors, strict=True)):
        own = [entry for entry in candidates(heads) if entry[2] == number]
        secured += own[: max(0, min(floor, head.size) - head.guarded)]
    secured.sort(key=lambda entry: entry[1:])
    for entry in secured + [entry for entry in candidates(heads) if entry not in secured]:
        if sum(counts) < total(heads):
            counts[entry[2]] += 1
    return counts


def good_enough(head: Head, threshold: float) -> int:
    """Entries that are protected or score at least so much."""
    return sum(g or s >= threshold for s, g in zip(head.scores, head.protected, strict=True))


def best_of_good(head: Head, threshold: float) -> int:
    """Protected entries, then one good one after the other until the share is used up."""
    count = head.guarded
    for score, guarded in zip(head.scores, head.protected, strict=True):
        if not guarded and score >= threshold and count < head.share:
            count += 1
    return count


def settle(ideal: Sequence[float], least: Sequence[int], most: Sequence[int], wanted: int) -> list[int]:
    """Shift all alike until the whole parts fit the total; the rest to the largest remainders."""

    def at(shift: int) -> list[int]:
        return [
            min(max(math.floor(x) + shift, low), high)
            for x, low, high in zip(ideal, least, most, strict=True)
        ]

    shift = -1000
    while shift < 1000 and sum(at(shift + 1)) <= wanted:
        shift += 1
    counts, above = at(shift), at(shift + 1)
    order = sorted(range(len(ideal)), key=lambda i: (-(ideal[i] - math.floor(ideal[i])), i))
    for i in order:
        if sum(counts) < wanted:
            counts[i] += above[i] - counts[i]
    return counts


def _bounded(heads: Sequence[Head], ideal: Sequence[float]) -> list[int]:
    return settle(ideal, [head.guarded for head in heads], [head.size for head in heads], total(heads))


def plus(heads: Sequence[Head], added: int) -> list[int]:
    """DBTrimKV's least number per head: rank for less, then add."""
    free = total(heads) - sum(head.guarded for head in heads) - added * len(heads)
    won = winners(heads, free)
    return _bounded(heads, [head.guarded + count + added for head, count in zip(heads, won, strict=True)])


def mixed(heads: Sequence[Head], floor: float) -> list[int]:
    """Ada-KV, official form, over the slots beside the protected entries."""
    won = winners(heads, total(heads) - sum(head.guarded for head in heads))
    ideal = [
        head.guarded + count * (1 - floor) + (head.share - head.guarded) * floor
        for head, count in zip(heads, won, strict=True)
    ]
    return _bounded(heads, ideal)


def pyramid(heads: Sequence[Head], beta: float) -> list[int]:
    """PyramidKV's line over the free slots, rounded per layer."""
    layers = 1 + max(head.layer for head in heads)
    share = heads[0].share
    guarded, held = max(head.guarded for head in heads), max(head.size for head in heads)
    free = share - guarded
    low = free / beta
    high = 2 * free - low
    if high >= held - guarded:
        high = held - guarded
        low = 2 * free - high
    if layers == 1 or not high >= low >= 0:
        line = [float(share)] * layers
    else:
        line = [guarded + high - place * ((high - low) / (layers - 1)) for place in range(layers)]
    rounded = settle(line, [0] * layers, [10**6] * layers, share * layers)
    return _bounded(heads, [rounded[head.layer] for head in heads])


def calibrated(scores: Sequence[float], by: str, mass: bool) -> list[float]:
    """Scores of the competing entries of one head, rescaled."""
    size = len(scores)
    mean = math.fsum(scores) / size
    deviation = max(math.sqrt(math.fsum((s - mean) ** 2 for s in scores) / size), 1e-6)
    standard = [(s - mean) / deviation for s in scores]
    if by == "rank":
        order = sorted(range(size), key=lambda i: (-scores[i], i))
        return [(size - order.index(i)) / size for i in range(size)]
    if by == "z-score":
        return standard
    if by == "softmax":
        weights = list(scores) if mass else [math.exp(z) for z in standard]
        return [w / math.fsum(weights) for w in weights]
    return list(scores)
