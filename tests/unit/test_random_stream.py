"""Random numbers: a hash of who asks for what, uniform and independent."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from kvkeep.core.random import RandomStream, _to_unit
from tests.reference.random_stream import uniform

NUMBERS = 20_000
PINNED = [0.961280882358551, 0.9783278107643127, 0.26417428255081177]  # seed 42, positions 0, 1, 2


def stream(sequences: int = 1, *, seed: int = 0, layer: int = 0, eviction: int = 0) -> RandomStream:
    """A stream for sequences 0, 1, 2 …"""
    ids = torch.arange(sequences)
    return RandomStream.derive(
        seed=seed, sequence_ids=ids, layer=layer, evictions=torch.full_like(ids, eviction)
    )


def places(count: int, heads: int = 1, batch: int = 1) -> Tensor:
    """Positions 0, 1, 2 … in every head."""
    return torch.arange(count).expand(batch, heads, count)


@pytest.mark.parametrize("seed", [0, 1, 2**63 + 11, 2**64 - 1, -5])
def test_is_the_documented_hash(seed: int) -> None:
    """Another engine (or another version) must be able to draw the same numbers from the description."""
    drawn = stream(3, seed=seed, layer=29, eviction=7).uniform(places(50, 2, 3) * 997, purpose=4)
    for row, head, i in itertools.product(range(3), range(2), range(50)):
        assert drawn[row, head, i].item() == uniform(seed, row, 29, 7, 4, head, i * 997)


def test_pinned_numbers() -> None:
    """A change of the hash would silently change every recorded run."""
    drawn = stream(seed=42).uniform(places(3))[0, 0].tolist()
    assert drawn == [uniform(42, 0, 0, 0, 0, 0, p) for p in range(3)]
    assert drawn == pytest.approx(PINNED, abs=0)


def check_uniform(numbers: Tensor) -> None:
    """Mean, variance and a histogram of 20 bins, each within 4.5 standard errors."""
    flat = numbers.flatten().double()
    count = flat.numel()
    assert float(flat.min()) > 0
    assert float(flat.max()) < 1
    assert abs(float(flat.mean()) - 0.5) < 4.5 * (1 / 12 / count) ** 0.5
    assert abs(float(flat.var()) - 1 / 12) < 4.5 * (1 / 180 / count) ** 0.5
    bins = torch.histc(flat, 20, 0, 1) / count
    assert float((bins - 0.05).abs().max()) < 4.5 * (0.05 * 0.95 / count) ** 0.5


def check_independent(first: Tensor, second: Tensor) -> None:
    """Correlation of the numbers, of their squares, and of their lowest bits, within 4.5 errors of none."""
    a, b = first.flatten().double(), second.flatten().double()
    bits = [((x * 2**23).long() & 1).double() for x in (a, b)]
    for x, y in ((a, b), ((a - 0.5) ** 2, (b - 0.5) ** 2), (bits[0], bits[1])):
        correlation = torch.corrcoef(torch.stack([x, y]))[0, 1]
        assert abs(float(correlation)) < 4.5 / math.sqrt(a.numel())


def test_uniform_over_positions() -> None:
    """Lots that favour some positions would bias every sampling policy."""
    check_uniform(stream().uniform(places(NUMBERS)))


@pytest.mark.parametrize("axis", ["head", "sequence", "eviction", "layer", "seed", "purpose"])
def test_uniform_and_independent_along(axis: str) -> None:
    """Neighbouring keys (head 0 and 1, eviction 5 and 6 …) must not give related numbers."""
    few = 8
    if axis == "head":
        drawn = stream().uniform(places(NUMBERS // few, few))[0]
    elif axis == "sequence":
        drawn = stream(few).uniform(places(NUMBERS // few, 1, few))[:, 0]
    elif axis == "purpose":
        drawn = torch.cat([stream().uniform(places(NUMBERS // few), purpose=i)[0] for i in range(few)])
    else:
        drawn = torch.cat([stream(**{axis: i}).uniform(places(NUMBERS // few))[0] for i in range(few)])
    check_uniform(drawn)
    for i, j in itertools.combinations(range(few), 2):
        check_independent(drawn[i], drawn[j])
    check_independent(drawn[:, 1:], drawn[:, :-1])  # neighbouring positions
    assert len(set(drawn[:, 0].tolist())) == few


def test_same_numbers_in_any_batch() -> None:
    """Law 4: a sequence draws what it would draw alone, in any row, beside anyone."""
    ids, where = torch.tensor([9, 4, 7]), places(30, 2, 3) + torch.tensor([0, 100, 5])[:, None, None]
    turns = torch.tensor([0, 3, 1])
    together = RandomStream.derive(seed=1, sequence_ids=ids, layer=2, evictions=turns)
    for order in itertools.permutations(range(3), 2):
        index = torch.tensor(order)
        some = RandomStream.derive(seed=1, sequence_ids=ids[index], layer=2, evictions=turns[index])
        for name in ("uniform", "gumbel"):
            expected = getattr(together, name)(where)[index]
            assert torch.equal(getattr(some, name)(where[index]), expected)
        assert torch.equal(some.normal((4, 3)), together.normal((4, 3))[index])


def test_numbers_follow_the_entry() -> None:
    """An entry's number must not depend on the slot it is stored in."""
    where = places(30)
    shuffled = torch.randperm(30)
    assert torch.equal(stream().uniform(where[..., shuffled]), stream().uniform(where)[..., shuffled])


def test_heads_of_a_layer_may_lie_on_several_ranks() -> None:
    """The first head of every rank would draw what the layer's first head draws."""
    ids, zero = torch.tensor([5, 9]), torch.zeros(2, dtype=torch.int64)

    def drawn(first: int, heads: int) -> Tensor:
        own = RandomStream.derive(seed=3, sequence_ids=ids, layer=1, evictions=zero, first_head=first)
        return torch.cat([each.uniform(places(30, heads, 2)) for each in (own, own.persistent)])

    assert torch.equal(torch.cat([drawn(0, 2), drawn(2, 2)], 1), drawn(0, 4))
    assert not torch.equal(drawn(0, 2), drawn(2, 2))


def test_persistent_numbers_ignore_the_eviction() -> None:
    """A projection that is drawn once per sequence and layer must come out the same each time."""
    first, later = stream(2, eviction=0), stream(2, eviction=9)
    assert torch.equal(first.persistent.normal((3, 2)), later.persistent.normal((3, 2)))
    assert torch.equal(first.persistent.uniform(places(9, 2, 2)), later.persistent.uniform(places(9, 2, 2)))
    check_independent(first.persistent.uniform(places(5000, 1, 2)), first.uniform(places(5000, 1, 2)))
    assert not torch.equal(first.persistent.normal((3,))[0], first.persistent.normal((3,))[1])


def test_normal() -> None:
    """Mean 0, variance 1, kurtosis 3, uncorrelated: a projection needs all of them."""
    drawn = stream(4).normal((NUMBERS // 8, 2)).double()
    assert drawn.shape == (4, NUMBERS // 8, 2)
    count = drawn.numel()
    assert abs(float(drawn.mean())) < 4.5 / count**0.5
    assert abs(float(drawn.var()) - 1) < 4.5 * (2 / count) ** 0.5
    assert abs(float((drawn**4).mean()) - 3) < 4.5 * (96 / count) ** 0.5
    below = [float((drawn < x).double().mean()) for x in (-1.0, 0.0, 1.0)]
    assert below == pytest.approx([0.1587, 0.5, 0.8413], abs=4.5 * 0.5 / count**0.5)
    correlation = torch.corrcoef(torch.stack([drawn[..., 0].flatten(), drawn[..., 1].flatten()]))[0, 1]
    assert abs(float(correlation)) < 4.5 / (count / 2) ** 0.5


def test_gumbel() -> None:
    """Mean 0.5772 and variance pi^2/6: the draw without replacement rests on it."""
    drawn = stream().gumbel(places(NUMBERS)).double()
    variance = math.pi**2 / 6
    assert float(drawn.mean()) == pytest.approx(0.577216, abs=4.5 * (variance / NUMBERS) ** 0.5)
    assert float(drawn.var()) == pytest.approx(variance, rel=0.05)
    assert bool(drawn.isfinite().all())


def test_extremes_stay_inside() -> None:
    """0 or 1 would become an infinite Gumbel number, and an entry that always or never stays."""
    ends = _to_unit(torch.tensor([0, -1]))
    assert ends.tolist() == [2.0**-24, 1 - 2.0**-24]
    assert bool((-torch.log(-torch.log(ends))).isfinite().all())
