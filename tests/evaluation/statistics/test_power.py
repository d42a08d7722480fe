"""How large a study must be."""

from __future__ import annotations

import numpy as np
import pytest

from kvkeep.core.errors import ConfigError
from kvkeep.evaluation.statistics.power import HARD_AND_EASY, Spread, pilot_spread, power, problems_needed
from tests.evaluation.statistics.studies import as_problems, draw_arms

BETA = HARD_AND_EASY


@pytest.mark.parametrize(
    ("problems", "draws", "error", "smallest", "corrected"),
    [(30, 8, 3.37, 9.4, 11.3), (198, 8, 1.31, 3.7, 4.4), (299, 3, 1.74, 4.9, 5.8), (500, 1, 2.33, 6.5, 7.8)],
)
def test_agrees_with_measured_studies(
    problems: int, draws: int, error: float, smallest: float, corrected: float
) -> None:
    """Standard errors and smallest differences that were measured on simulated studies."""
    single, family = (power(problems, draws, 0.05, BETA, cells=cells) for cells in (1, 4))
    assert 100 * single.standard_error == pytest.approx(error, rel=0.03)
    assert 100 * single.smallest == pytest.approx(smallest, rel=0.03)
    assert 100 * family.smallest == pytest.approx(corrected, rel=0.03)


def test_problems_needed_reach_the_power_and_no_fewer_do() -> None:
    """A study planned one problem short would be planned in vain."""
    needed = problems_needed(0.03, 3, BETA, cells=4)
    assert power(needed, 3, 0.03, BETA, cells=4).power >= 0.8
    assert power(needed - 1, 3, 0.03, BETA, cells=4).power < 0.8
    assert problems_needed(0.03, 16, BETA) < problems_needed(0.03, 1, BETA)


def test_samples_cannot_replace_problems() -> None:
    """If a policy helps some problems and hurts others, more draws of the same ones stop helping."""
    uneven = Spread(draw_variance=0.14, effect_variance=0.04)
    assert uneven.standard_error(30, 10_000) == pytest.approx((0.04 / 30) ** 0.5, rel=1e-2)


def test_pilot_recovers_the_spread() -> None:
    """A pilot that underestimated the noise would plan a study that finds nothing."""
    before, after = (as_problems(arm[0], draws=4) for arm in draw_arms(np.random.default_rng(2), 1, 4000, 4))
    assert pilot_spread(before).draw_variance == pytest.approx(BETA.draw_variance, rel=0.05)
    both = pilot_spread(before, after)
    assert both.draw_variance == pytest.approx(BETA.draw_variance, rel=0.05)
    assert both.effect_variance < 0.005
    opposed = pilot_spread(as_problems([0.0, 1.0] * 50), as_problems([1.0, 0.0] * 50))
    assert (opposed.draw_variance, opposed.effect_variance) == (0.0, pytest.approx(100 / 99))


def test_power_is_words_and_mistakes_are_explained() -> None:
    """The estimate is read by people who plan."""
    assert "299 problems x 3 samples: a true difference of 5.0 pp" in str(power(299, 3, 0.05, BETA))
    assert power(10, 1, 0.0, BETA).power == pytest.approx(0.05)
    with pytest.raises(ConfigError, match=r"0\.03 for 3 points"):
        power(100, 3, 3.0, BETA)
    with pytest.raises(ConfigError, match="other than 0"):
        problems_needed(0.0, 3, BETA)
    with pytest.raises(ConfigError, match="at least two draws"):
        pilot_spread(as_problems([0.0, 1.0], draws=1))
    with pytest.raises(ConfigError, match="at least one of each"):
        power(0, 3, 0.1, BETA)
