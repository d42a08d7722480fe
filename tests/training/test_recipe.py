"""The one dial, what follows from it, and the schedule."""

import math

import pytest

from kvkeep.training import Recipe


def test_the_rate_rises_and_falls_along_half_a_cosine() -> None:
    recipe = Recipe(memory=8, steps=20, warmup=4, rate=2.0, least_rate=0.1)
    rates = [recipe.rate_at(step) for step in range(20)]
    assert rates[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    for step in range(4, 20):
        expected = 0.2 + 1.8 * (1 + math.cos(math.pi * (step - 4) / 16)) / 2
        assert rates[step] == pytest.approx(expected)
    assert recipe.rate_at(20) == pytest.approx(0.2)


@pytest.mark.parametrize(("steps", "rising"), [(1, 0), (60, 6), (1000, 100), (10_000, 100)])
def test_the_warm_up_fits_the_steps(steps: int, rising: int) -> None:
    recipe = Recipe(memory=8, steps=steps)
    assert recipe.rising == recipe.facts()["warmup"] == rising
    assert max(recipe.rate_at(step) for step in range(steps)) == recipe.rate
    assert Recipe(memory=8, steps=steps, warmup=7).rising == 7


def test_the_limit_is_that_of_the_architecture() -> None:
    assert Recipe(memory=8, architecture="rg").limit == "local"
    assert Recipe(memory=8).limit == Recipe(memory=8).facts()["scope"] == "global"
    assert Recipe(memory=8, scope="local").limit == "local"
