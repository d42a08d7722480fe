"""What is read off log betas: against the definitions, one token at a time."""

from __future__ import annotations

import math

import pytest
import torch

from kvkeep.gates.inspection import capacity, half_lives, rank_tokens, spread, summarise


def some(layers: int = 2, heads: int = 3, tokens: int = 17) -> torch.Tensor:
    """Log betas over many powers of ten."""
    noise = torch.Generator().manual_seed(3)
    return -(10 ** (4 * torch.rand(layers, heads, tokens, generator=noise) - 3.5))


def test_a_half_life_is_the_time_until_half_is_left() -> None:
    """beta = 0.5 halves at every token; the published start nearly never."""
    log_beta = torch.tensor([math.log(0.5), math.log(0.25), -1.5e-8])
    assert half_lives(log_beta).tolist() == pytest.approx([1.0, 0.5, math.log(2) / 1.5e-8], rel=1e-6)
    assert bool((log_beta.double() * half_lives(log_beta)).exp().allclose(torch.tensor(0.5).double()))


def test_a_beta_that_rounds_to_one_stays_finite() -> None:
    """An infinite mean would hide all other tokens of the head."""
    life = summarise(torch.tensor([0.0, math.log(0.5)]))
    assert math.isfinite(life.arithmetic)
    assert life.of_mean == pytest.approx(2.0)


def test_the_means_are_ordered() -> None:
    """Harmonic, geometric and arithmetic: which is shown matters by powers of ten."""
    log_beta = some()
    life, lives = summarise(log_beta), half_lives(log_beta).flatten().tolist()
    assert life.of_mean == pytest.approx(len(lives) / sum(1 / each for each in lives))
    assert life.mean == pytest.approx(math.prod(each ** (1 / len(lives)) for each in lives))
    assert life.arithmetic == pytest.approx(sum(lives) / len(lives))
    assert life.of_mean < life.mean < life.arithmetic
    assert life.median == pytest.approx(float(torch.tensor(lives).double().quantile(0.5)))


def test_nothing_has_no_half_life() -> None:
    with pytest.raises(ValueError, match="give at least one log beta"):
        summarise(torch.zeros(2, 3, 0))


def test_capacity_is_the_double_sum() -> None:
    """Of training, to the digit: t - j, so that the newest token counts whole."""
    log_beta, times = some(), [0, 4, 16]
    live = capacity(log_beta, times)
    for layer in range(2):
        for head in range(3):
            betas = [math.exp(each) for each in log_beta[layer, head].tolist()]
            for place, t in enumerate(times):
                wanted = sum(betas[j] ** (t - j) for j in range(t + 1))
                assert float(live[layer, head, place]) == pytest.approx(wanted, rel=1e-5)
    assert live[..., 0].eq(1).all()


@pytest.mark.parametrize(
    ("tokens", "count", "wanted"), [(3, 12, [0, 1, 2]), (100, 4, [24, 49, 74, 99]), (1, 5, [0])]
)
def test_the_curve_ends_with_the_text(tokens: int, count: int, wanted: list[int]) -> None:
    """The last token is the one that M is compared with."""
    assert spread(tokens, count) == wanted


def test_ranking() -> None:
    """Longest first by the mean over heads of the logarithm; what is left counts the age."""
    log_beta = torch.tensor([[[-0.1, -0.001, -1.0, -0.1]], [[-0.1, -0.1, -1.0, -0.1]]])
    ranked = rank_tokens(log_beta)
    assert [token.position for token in ranked] == [1, 0, 3, 2]
    assert ranked[0].half_life == pytest.approx(math.log(2) / math.sqrt(0.001 * 0.1), rel=1e-5)
    assert ranked[0].left == pytest.approx((math.exp(-0.002) + math.exp(-0.2)) / 2)
    assert ranked[2].left == 1.0
