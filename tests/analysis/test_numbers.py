"""Correlations, shares, spreads and overlaps against scipy, numpy and sets."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from kvkeep.analysis.findings import values_findings
from kvkeep.analysis.link import link, pearson, ranks, share_of_top, slope
from kvkeep.analysis.overlap import overlaps, top_set
from kvkeep.analysis.reading import MAGNITUDES, Portion
from kvkeep.analysis.spread import SINKS, spread, stretch
from kvkeep.core.errors import ConfigError


def test_correlations_are_those_of_scipy() -> None:
    """Ties too: half-precision values have many equal ranges."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 20, (3, 40), generator=generator).float()
    y = x + torch.randint(0, 30, (3, 40), generator=generator)
    found = link(x, x, y, y)
    flat = (x.flatten().numpy(), y.flatten().numpy())
    assert found.pearson == pytest.approx(stats.pearsonr(*flat).statistic)
    assert found.spearman == pytest.approx(stats.spearmanr(*flat).statistic)
    np.testing.assert_array_equal(ranks(x.flatten()).numpy(), stats.rankdata(flat[0]))
    assert found.over_law == pytest.approx(1)
    assert found.entries == 120


def test_a_square_law_is_found() -> None:
    """Slope 2, rank correlation 1, and the shares that squares have."""
    ranges = torch.linspace(0.1, 10, 100)
    found = link(ranges, ranges.flip(0), 3 * ranges.square(), ranges.square())
    assert found.slope == pytest.approx(2)
    assert (found.spearman, found.spearman_norm) == (pytest.approx(1), pytest.approx(-1))
    assert found.over_law == pytest.approx(3)
    squares = np.sort(ranges.double().numpy() ** 2)
    for top, count in ((0.01, 1), (0.05, 5), (0.1, 10)):
        assert found.shares[f"{top:g}"] == pytest.approx(squares[-count:].sum() / squares.sum())
    assert found.shares == pytest.approx(dict(found.square_shares))


def test_what_does_not_vary_correlates_with_nothing() -> None:
    """A layer whose values are all alike must not end in a NaN."""
    same = torch.ones(5)
    found = link(same, same, torch.zeros(5), torch.zeros(5))
    assert (found.pearson, found.spearman, found.slope, found.over_law) == (0, 0, 0, 0)
    assert pearson(same, torch.arange(5.0)) == slope(same, torch.arange(5.0)) == 0
    assert share_of_top(same, same * 0, 0.5) == 0
    with pytest.raises(ConfigError, match="longer text"):
        link(same[:2], same[:2], same[:2], same[:2])


def test_spreads_are_those_of_numpy() -> None:
    """The tail ratio divides the last percent by the middle."""
    numbers = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(1)).exp()
    found = spread(numbers)
    assert found is not None
    flat = numbers.double().numpy()
    assert (found.p50, found.p99) == (pytest.approx(np.median(flat)), pytest.approx(np.quantile(flat, 0.99)))
    assert found.tail == pytest.approx(np.quantile(flat, 0.99) / np.median(flat))
    assert found.largest == flat.max()
    assert spread(torch.zeros(0)) is None
    silent = spread(torch.zeros(4))
    assert silent is not None
    assert silent.tail == 0


@pytest.mark.parametrize("length", [1, 5, 20, 333])
def test_every_position_has_one_stretch(length: int) -> None:
    """Sinks apart, the others in order, each stretch as long as the next but for one."""
    places = stretch(length)
    assert places[:SINKS].tolist() == [-1] * min(SINKS, length)
    rest = places[SINKS:]
    assert bool((rest.diff() >= 0).all())
    assert all(0 <= each < 16 for each in rest.tolist())
    if len(rest) >= 16:
        assert int(torch.bincount(rest).max() - torch.bincount(rest).min()) <= 1


def test_overlaps_are_those_of_sets() -> None:
    """Planted: half of the largest ranges are the most attended to."""
    scores = {
        "range": torch.tensor([[[9.0, 8, 1, 0, 2, 3]]]),
        "attention": torch.tensor([[[9.0, 0, 8, 1, 2, 3]]]),
        "l2": torch.tensor([[[0.0, 0, 5, 5, 0, 0]]]),
    }
    found = {(each.one, each.other): each for each in overlaps(scores, 2)}
    assert float(found["range", "attention"].share) == 0.5
    assert float(found["range", "attention"].jaccard) == pytest.approx(1 / 3)
    assert float(found["range", "l2"].share) == 0
    assert found["range", "l2"].chance == pytest.approx(2 / 6)
    assert top_set(torch.zeros(1, 1, 4), 2).tolist() == [[[True, True, False, False]]]


@pytest.mark.parametrize(("window", "left_out"), [(5, 5), (12, 0)])
def test_top_sets_leave_out_what_every_policy_keeps(window: int, left_out: int) -> None:
    """Sinks and the newest entries; a text that would lose more than half keeps the newest."""
    generator = torch.Generator().manual_seed(3)
    scores = {kind: torch.rand(2, 3, 24, generator=generator) for kind in MAGNITUDES}
    attention = torch.rand(2, 3, 24, generator=generator)
    attention[..., -5:] += 1
    portion = Portion(
        layers=(0, 1), magnitudes=scores, attention=attention, window=window,
        retention=None, errors={}, expected={},
    )  # fmt: skip
    found = values_findings([portion, portion], reserve=4)
    assert found["recent"] == [left_out] * 2
    (pair,) = (each for each in found["overlaps"] if (each["one"], each["other"]) == ("range", "attention"))

    def top(numbers: torch.Tensor) -> set[int]:
        among = range(SINKS, 24 - left_out)
        return set(sorted(among, key=lambda place: -float(numbers[place]))[:4])

    for layer in range(2):
        for head in range(3):
            both = top(scores["range"][layer, head]) & top(attention[layer, head])
            assert pair["heads"][layer][head] == pytest.approx(len(both) / 4)
    assert pair["chance"] == pytest.approx(4 / (20 - left_out), rel=1e-4)
