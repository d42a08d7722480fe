"""The draw without replacement has the distribution it claims."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch

from kvkeep.core.decision import KeepCounts
from kvkeep.core.random import RandomStream
from kvkeep.selection.weighted_sample import weighted_sample
from kvkeep.testing.views import kept


def sample(
    weights: list[float],
    count: int,
    *,
    rows: int,
    already: tuple[int, ...] = (),
    closed: tuple[int, ...] = (),
) -> list[list[int]]:
    """Draw for many sequences at once; ``already`` is kept, ``closed`` may not be drawn."""
    size = len(weights)
    stream = RandomStream.derive(
        seed=3, sequence_ids=torch.arange(rows), layer=0, evictions=torch.zeros(rows, dtype=torch.int64)
    )
    mine = torch.zeros(size, dtype=torch.bool)
    mine[list(already)] = True
    free = ~mine
    free[list(closed)] = False
    decision = weighted_sample(
        torch.tensor(weights).expand(rows, 1, size),
        KeepCounts(torch.full((rows, 1), count), count),
        candidates=free.expand(rows, 1, size),
        kept=mine.expand(rows, 1, size),
        positions=torch.arange(size).expand(rows, 1, size),
        random=stream,
    )
    return [row[0] for row in kept(decision)]


def successive(weights: list[float], count: int) -> dict[tuple[int, ...], float]:
    """Exact probability of each set under successive draws proportional to the remaining weights."""
    answer: dict[tuple[int, ...], float] = {}
    for order in itertools.permutations(range(len(weights)), count):
        chance, left = 1.0, sum(weights)
        for i in order:
            chance *= weights[i] / left
            left -= weights[i]
        key = tuple(sorted(order))
        answer[key] = answer.get(key, 0.0) + chance
    return answer


@pytest.mark.parametrize("count", [1, 2, 4])
def test_distribution_is_that_of_successive_draws(count: int) -> None:
    """Weights read as something else (squares, ranks) would change which thoughts survive."""
    weights, rows = [5.0, 1.0, 2.0, 0.5, 3.0], 40_000
    seen = Counter(tuple(row) for row in sample(weights, count, rows=rows))
    exact = successive(weights, count)
    assert sum(exact.values()) == pytest.approx(1)
    for key, chance in exact.items():
        deviation = (seen[key] / rows - chance) / (chance * (1 - chance) / rows) ** 0.5
        assert abs(deviation) < 4.5, (key, seen[key] / rows, chance)
    # Power of the test: even one more step of weight would be seen.
    other = successive([5.0, 1.0, 2.2, 0.5, 3.0], count)
    assert any(
        abs(seen[key] / rows - chance) / (chance * (1 - chance) / rows) ** 0.5 > 4.5
        for key, chance in other.items()
    )


def test_uniform_weights_include_evenly() -> None:
    """Methods 2.9, invariant 3: (Kp - Nv) / (nc - Nv) for everything outside the reserve."""
    rows, reserved, candidates, wanted = 20_000, 3, 20, 11
    drawn = sample([0.25] * candidates, wanted, rows=rows, already=(0, 7, 19))
    share = (wanted - reserved) / (candidates - reserved)
    counts = Counter(i for row in drawn for i in row)
    for i in range(candidates):
        if i in (0, 7, 19):
            assert counts[i] == rows
        else:
            assert abs(counts[i] / rows - share) < 4.5 * (share * (1 - share) / rows) ** 0.5


def test_scale_of_the_weights_does_not_matter() -> None:
    """Attention over a long context has tiny shares; they must not underflow into a tie."""
    weights = [5.0, 1.0, 2.0, 0.5, 3.0]
    assert sample(weights, 2, rows=500) == sample([w * 2.0**-60 for w in weights], 2, rows=500)


def test_zero_weights_are_drawn_last() -> None:
    """A peaked head may have fewer non-zero weights than slots; the count must still be met."""
    for row in sample([0.0, 1.0, 0.0, 2.0, 0.0, 0.0], 3, rows=200):
        assert {1, 3} < set(row)
    assert {tuple(row) for row in sample([0.0] * 4, 1, rows=200)} == {(0,), (1,), (2,), (3,)}


def test_closed_entries_are_never_drawn() -> None:
    """A padding slot or a reserved entry with a large weight must not come in by the draw."""
    for row in sample([1.0, 50.0, 1.0, 1.0, 1.0], 3, rows=200, already=(4,), closed=(1,)):
        assert 1 not in row
        assert 4 in row
        assert len(row) == 3


def test_all_slots_taken() -> None:
    """Nothing to draw is not an error."""
    assert sample([1.0, 1.0, 1.0], 2, rows=3, already=(0, 2)) == [[0, 2]] * 3
