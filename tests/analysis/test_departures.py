"""What an eviction takes, against loops over sorted lists."""

from __future__ import annotations

import pytest
import torch

from kvkeep.analysis.departures import Departures, departures


def by_hand(
    ranges: list[list[float]], positions: list[list[int]], candidates: list[list[bool]],
    evicted: list[list[bool]], seen: int, prompt: int,
) -> dict[str, float]:  # fmt: skip
    """Entry by entry."""
    found = dict.fromkeys(
        ("entries", "places", "large", "candidates", "large_candidates", "age", "prompt", "sinks"), 0.0
    )
    for size, where, could, goes in zip(ranges, positions, candidates, evicted, strict=True):
        ranked = sorted((size[i], i) for i in range(len(size)) if could[i])
        last = len(ranked) - 1
        for rank, (_, entry) in enumerate(ranked):
            large = 10 * rank > 9 * last
            found["candidates"] += 1
            found["large_candidates"] += large
            if goes[entry]:
                found["entries"] += 1
                found["places"] += rank / last if last else 0.5
                found["large"] += large
                found["age"] += seen - 1 - where[entry]
                found["prompt"] += where[entry] < prompt
                found["sinks"] += where[entry] < 4
    return found


@pytest.mark.parametrize("seed", range(8))
def test_sums_are_those_of_a_loop(seed: int) -> None:
    """Ties, heads without a candidate, and entries that stay whatever happens."""
    generator = torch.Generator().manual_seed(seed)
    ranges = torch.randint(0, 9 + 40 * (seed % 2), (3, 31), generator=generator).float()
    candidates = torch.rand(3, 31, generator=generator) < 0.7
    candidates[seed % 3] &= torch.arange(31) == 5 if seed < 4 else torch.zeros(31, dtype=torch.bool)
    evicted = candidates & (torch.rand(3, 31, generator=generator) < 0.4)
    positions = torch.arange(31).expand(3, 31) * 2
    found = departures(ranges, positions, candidates, evicted, seen=80, prompt=21)
    expected = by_hand(*(each.tolist() for each in (ranges, positions, candidates, evicted)), 80, 21)
    assert vars(found) == pytest.approx(expected)


def test_a_policy_that_takes_the_largest_shows() -> None:
    """Ten of a hundred: all that is large goes, and the mean place is that of the top."""
    ranges, everything = torch.rand(2, 100), torch.ones(2, 100, dtype=torch.bool)
    largest = ranges >= ranges.sort(-1).values[:, -10:-9]
    lost = departures(ranges, torch.arange(100).expand(2, 100), everything, largest, seen=100, prompt=0)
    facts = lost.facts()
    assert facts["entries"] == 20
    assert facts["large"] == facts["large_lost"] == 1
    assert facts["lost"] == 0.1
    assert facts["range"] == pytest.approx(94.5 / 99, abs=1e-4)
    twice = (lost + lost).facts()
    assert twice.pop("entries") == 40
    assert twice == {name: value for name, value in facts.items() if name != "entries"}


def test_nothing_lost_is_no_division_by_zero() -> None:
    """A head can keep all it has."""
    nothing = torch.zeros(1, 4, dtype=torch.bool)
    lost = departures(torch.rand(1, 4), torch.arange(4)[None], nothing, nothing, seen=4, prompt=0)
    assert lost == Departures(
        entries=0, places=0, large=0, candidates=0, large_candidates=0, age=0, prompt=0, sinks=0
    )
    assert lost.facts()["range"] == 0
