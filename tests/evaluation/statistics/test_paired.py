"""Two runs on the same problems."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from kvkeep.core.errors import ConfigError
from kvkeep.evaluation.statistics.paired import paired_average, paired_difference
from kvkeep.evaluation.statistics.problem_means import cluster_sums
from kvkeep.evaluation.statistics.resampling import bootstrap_means, bootstrap_p, sign_flip_p
from tests.evaluation.statistics.studies import as_problems, draw_arms
from tests.reference import paired as reference


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def test_tiny_example_by_hand() -> None:
    """Differences 1, 1/3, 0, −1/3: the mean is 1/4; 6 of 8 ways to set the signs reach it."""
    result = paired_difference(
        as_problems([0, 1 / 3, 1, 1 / 3]), as_problems([1, 2 / 3, 1, 0]), rng=rng(), resamples=2000
    )
    assert result.estimate == pytest.approx(0.25)
    assert (result.baseline, result.challenger) == pytest.approx((5 / 12, 8 / 12))
    assert (result.better, result.worse, result.equal) == (2, 1, 1)
    # |±1 ±1/3 ±1/3| >= 1 holds for 6 of 8 choices of signs; the zero changes nothing.
    assert result.p_sign_flip == pytest.approx(6 / 8)
    assert (result.test, result.p) == ("sign-flip", result.p_sign_flip)
    assert "+25.00 pp" in str(result)


def test_same_seed_same_numbers() -> None:
    """A p value that changed with every look could be looked at until it pleases."""
    before, after = (as_problems(arm[0]) for arm in draw_arms(rng(), 1, 80, 3))
    first, again = (paired_difference(before, after, rng=rng(), resamples=500) for _ in range(2))
    assert first == again
    other = paired_difference(before, after, rng=np.random.default_rng(8), resamples=500)
    assert other.interval != first.interval


def test_swapping_the_arms_swaps_the_sign() -> None:
    """A comparison that favoured the challenger's place would be no comparison."""
    before, after = (as_problems(arm[0]) for arm in draw_arms(rng(), 1, 80, 3, effect=0.2))
    forth = paired_difference(before, after, rng=rng(), resamples=500)
    back = paired_difference(after, before, rng=rng(), resamples=500)
    assert back.estimate == -forth.estimate
    assert back.interval == pytest.approx((-forth.interval[1], -forth.interval[0]))
    assert (back.p_bootstrap, back.p_sign_flip) == (forth.p_bootstrap, forth.p_sign_flip)


@pytest.mark.parametrize("groups", [None, "aabbccddeeffggghhhij"])
def test_agrees_with_the_slow_twin(groups: str | None) -> None:
    """The vectorised resampling must draw whole clusters, with replacement, as the definition says."""
    before, after = draw_arms(rng(), 1, 20, 3, effect=0.3)
    sums, sizes = cluster_sums((after - before)[0], as_problems(after[0], groups=groups).groups)
    fast = bootstrap_means(sums, sizes, resamples=20_000, rng=rng())
    slow, p = reference.bootstrap(sums, sizes, 4000, rng())
    assert np.quantile(fast, [0.025, 0.5, 0.975]) == pytest.approx(
        np.quantile(slow, [0.025, 0.5, 0.975]), abs=0.012
    )
    assert bootstrap_p(fast) == pytest.approx(p, abs=0.02)


def test_sign_flip_is_exact_for_few_and_close_for_many() -> None:
    """Below 60 problems this test decides: an error here would decide wrongly on every AIME."""
    generator = rng()
    for _ in range(5):
        sums = generator.choice([-2, -1, 0, 0, 1, 2, 3], 11) / 3
        exact = reference.sign_flip(sums)
        assert sign_flip_p(sums, resamples=5000, rng=rng()) == pytest.approx(exact)
        assert sign_flip_p(sums, resamples=2000, rng=rng()) == pytest.approx(exact, abs=0.06)


def test_no_difference_is_never_a_finding() -> None:
    """Rounding in sums of thirds must not turn a tie into a side."""
    same = as_problems(np.tile([1 / 3, 2 / 3, 1.0, 0.0], 20))
    result = paired_difference(same, same, rng=rng(), resamples=500)
    assert (result.p, result.p_bootstrap, result.p_sign_flip) == (1.0, 1.0, 1.0)
    assert result.interval == (0.0, 0.0)
    cancelling = as_problems(np.tile([2 / 3, 1 / 3, 0.0, 1.0], 20))
    assert paired_difference(same, cancelling, rng=rng(), resamples=500).p_sign_flip == 1.0


def test_p_is_never_zero() -> None:
    """Ten thousand resamples cannot show that something has probability zero."""
    result = paired_difference(as_problems(np.zeros(80)), as_problems(np.ones(80)), rng=rng(), resamples=999)
    assert result.p_bootstrap == pytest.approx(2 / 1000)
    assert result.test == "bootstrap"


def test_a_family_widens_the_interval() -> None:
    """Four intervals of 95 % do not hold together with 95 %."""
    before, after = (as_problems(arm[0]) for arm in draw_arms(rng(), 1, 100, 3))
    result = paired_difference(before, after, rng=rng(), cells=4)
    assert result.family_level == pytest.approx(0.9875)
    assert result.family_interval[0] < result.interval[0] < result.interval[1] < result.family_interval[1]


def test_tasks_weigh_the_same_in_an_average() -> None:
    """500 easy problems must not drown 30 hard ones when a policy is judged over five tasks."""
    small = as_problems(np.zeros(10)), as_problems(np.ones(10))
    large = as_problems(np.zeros(90)), as_problems(np.zeros(90))
    result = paired_average([small, large], rng=rng(), resamples=500)
    assert (result.n, result.clusters) == (100, 100)
    assert result.estimate == 0.5
    assert result.interval == (0.5, 0.5)


def test_different_problems_are_refused() -> None:
    """Pairing by position would compare different questions."""
    with pytest.raises(ConfigError, match="2 problems are in one only"):
        paired_difference(as_problems(np.zeros(4)), as_problems(np.zeros(6)), rng=rng())
    one = as_problems(np.zeros(4))
    with pytest.raises(ConfigError, match="same problems"):
        paired_difference(one, dataclasses.replace(one, groups=("x",) * 4), rng=rng())
    with pytest.raises(ConfigError, match="at least two"):
        paired_difference(as_problems([0.0]), as_problems([1.0]), rng=rng())
    with pytest.raises(ConfigError, match="too few"):
        paired_difference(one, one, rng=rng(), resamples=10)
    with pytest.raises(ConfigError, match="0 cells"):
        paired_difference(one, one, rng=rng(), cells=0)
