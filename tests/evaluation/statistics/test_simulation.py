"""Thousands of studies with a known truth: the statistics must be right as often as they say."""

from __future__ import annotations

import numpy as np
import pytest
from statsmodels.stats.multitest import multipletests

from kvkeep.evaluation.statistics.correction import corrected
from kvkeep.evaluation.statistics.resampling import bootstrap_means, bootstrap_p, sign_flip_p
from tests.evaluation.statistics.studies import draw_arms

STUDIES, CELLS = 2000, 4
# A rate of 5 % measured on 2,000 studies comes out below 5 % + 1.645 standard errors in 95 of 100 cases.
LIMIT = 0.05 + 1.645 * (0.05 * 0.95 / STUDIES) ** 0.5


def family_errors(p: np.ndarray) -> dict[str, float]:
    """Share of the studies that find something in any of their four empty cells."""
    cells = p.reshape(STUDIES, CELLS)
    return {
        method: float(
            np.mean(
                [
                    min(corrected(dict(zip("abcd", each, strict=True)), method).values()) < 0.05
                    for each in cells
                ]
            )
        )
        for method in ("holm", "bonferroni")
    }


@pytest.mark.slow
@pytest.mark.parametrize("problems", [200, 299])
def test_bootstrap_keeps_its_promises(problems: int) -> None:
    """An interval or a p that lied would make every table of this project a rumour."""
    rng = np.random.default_rng(problems)
    before, after = draw_arms(rng, STUDIES * CELLS, problems, 3)
    distribution = bootstrap_means(after - before, np.ones(problems), resamples=999, rng=rng)
    low, high = np.quantile(distribution, [0.025, 0.975], axis=-1)
    assert 0.93 <= np.mean((low <= 0) & (high >= 0)) <= 0.97
    errors = family_errors(bootstrap_p(distribution))
    assert errors["holm"] == errors["bonferroni"]  # with nothing to find, the first step decides
    assert errors["holm"] <= LIMIT


def test_sign_flip_holds_on_thirty_problems() -> None:
    """On thirty problems the bootstrap is too bold, so the decision rests on this test."""
    rng = np.random.default_rng(30)
    before, after = draw_arms(rng, STUDIES * CELLS, 30, 8)
    assert family_errors(sign_flip_p(after - before, resamples=999, rng=rng))["holm"] <= LIMIT


def test_a_real_effect_is_covered_and_found() -> None:
    """Statistics that never erred because they never spoke would pass all tests above."""
    rng = np.random.default_rng(1)
    before, after = draw_arms(rng, 1000, 200, 3, effect=0.16)
    distribution = bootstrap_means(after - before, np.ones(200), resamples=999, rng=rng)
    low, high = np.quantile(distribution, [0.025, 0.975], axis=-1)
    truth = 0.16 * 0.5
    assert 0.93 <= np.mean((low <= truth) & (high >= truth)) <= 0.97
    assert np.mean(bootstrap_p(distribution) < 0.05) > 0.9
    assert np.mean(sign_flip_p(after - before, resamples=999, rng=rng) < 0.05) > 0.9
    assert multipletests([0.01, 0.04], method="holm")[1].tolist() == [0.02, 0.04]
