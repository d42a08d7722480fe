"""Round trips against loops in float64, written from the formulas, and the laws that they obey."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvkeep.analysis.half_quadratic import half_quadratic, shrink
from kvkeep.analysis.round_trip import SCHEMES, Scheme, fitting, law, min_max, scheme, token_error
from kvkeep.core.errors import ConfigError


def by_hand(group: np.ndarray, bits: int) -> np.ndarray:
    """Plain rounding of one group, channel by channel."""
    low, high, back = group.min(), group.max(), []
    step = (high - low) / (2**bits - 1)
    for number in group:
        code = 0 if step == 0 else round((number - low) / step)
        back.append(low + code * step)
    return np.array(back)


def half_quadratic_by_hand(group: np.ndarray, bits: int, turns: int = 20) -> np.ndarray:
    """The solver of hqq 0.2.8, one group alone, in float64; a gain below a millionth is none."""
    top = 2**bits - 1
    low, span = group.min(), group.max() - group.min()
    scale = min(top / span if span > 1e-4 else 1.0, 2e4)
    zero, best = -low * scale, np.inf
    for _ in range(turns):
        codes = np.clip(np.round(group * scale + zero), 0, top)
        error = group - (codes - zero) / scale
        size = np.abs(error)
        with np.errstate(divide="ignore"):
            outlier = np.sign(error) * np.maximum(size - size**-0.3 / 10, 0)
        zero = np.mean(codes - (group - outlier) * scale)
        if size.mean() < best * (1 - 1e-6):
            best = size.mean()
        else:
            break
    return (np.clip(np.round(group * scale + zero), 0, top) - zero) / scale


@pytest.mark.parametrize(("bits", "group"), [(2, 4), (4, 8), (8, 16)])
@pytest.mark.parametrize("width", [0.05, 1.0, 40.0])
def test_round_trips_are_those_of_the_formulas(bits: int, group: int, width: float) -> None:
    """In float64: a code that differs would show as a whole step."""
    generator = torch.Generator().manual_seed(bits)
    values = width * torch.randn(3, 5, 16, generator=generator, dtype=torch.float64)
    for ours, loop in ((min_max, by_hand), (half_quadratic, half_quadratic_by_hand)):
        back = ours(values, bits=bits, group=group)
        for vector, found in zip(values.reshape(-1, 16).numpy(), back.reshape(-1, 16), strict=True):
            expected = np.concatenate([loop(part, bits) for part in vector.reshape(-1, group)])
            np.testing.assert_allclose(found.numpy(), expected, atol=1e-12 * width, rtol=1e-9)


def test_a_token_does_not_depend_on_its_neighbours() -> None:
    """The package stops for a whole tensor at once; here a token's error is its own."""
    values = (
        torch.randn(6, 32, generator=torch.Generator().manual_seed(1)) * torch.logspace(-2, 2, 6)[:, None]
    )
    together = half_quadratic(values, bits=2, group=8)
    alone = torch.cat([half_quadratic(row[None], bits=2, group=8) for row in values])
    assert torch.equal(together, alone)


def test_the_law_holds_where_channels_are_spread_evenly() -> None:
    """Uniform channels fill their steps; the two extremes of each group alone have no error."""
    values = (
        torch.rand(4000, 64, generator=torch.Generator().manual_seed(2))
        * torch.logspace(-1, 1, 4000)[:, None]
    )
    for bits in (2, 4, 8):
        error = token_error(values, min_max(values, bits=bits, group=32))
        assert float(error.sum() / law(values, bits=bits, group=32).sum()) == pytest.approx(30 / 32, abs=0.02)


def test_no_error_is_larger_than_half_a_step() -> None:
    """What rounding promises; a constant vector comes back as it was, one of zeros too."""
    values = torch.randn(50, 32, generator=torch.Generator().manual_seed(3))
    groups = values.unflatten(-1, (-1, 8))
    step = (groups.amax(-1) - groups.amin(-1)) / 3
    away = (min_max(values, bits=2, group=8) - values).abs().unflatten(-1, (-1, 8)).amax(-1)
    assert bool((away <= step / 2 + 1e-6).all())
    for constant in (0.0, 3.5):
        same = torch.full((2, 8), constant)
        assert torch.equal(min_max(same, bits=2, group=8), same)
        assert torch.allclose(half_quadratic(same, bits=2, group=8), same, atol=0.51)


def test_shrinking_leaves_outliers_alone() -> None:
    """Small errors are no outliers, and none is divided by zero."""
    found = shrink(torch.tensor([0.0, 0.01, -5.0]))
    assert found[:2].tolist() == [0, 0]
    assert float(found[2]) == pytest.approx(-(5 - 0.1 * 5**-0.3))


@pytest.mark.parametrize("name", ["b2g32", "hqq-b3g32", "hqq-b2g0", "hqq_b2g32", "fp8"])
def test_unknown_schemes_are_explained(name: str) -> None:
    """A typing error must not choose another scheme."""
    with pytest.raises(ConfigError, match="hqq-b2g32"):
        scheme(name)


def test_names_say_what_is_done() -> None:
    """A scheme is read back from its own name."""
    assert [scheme(each.name) for each in SCHEMES] == list(SCHEMES)
    assert fitting(SCHEMES, 32) == tuple(each for each in SCHEMES if each.group == 32)
    assert Scheme("minmax", 4, 64).bits_per_channel == 4.5
