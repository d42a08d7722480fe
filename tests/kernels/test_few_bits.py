"""Vectors in few bits against loops over single numbers, and what rounding may cost."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.kernels import few_bits
from tests.reference import few_bits as reference

CASES = [(bits, group, dim) for bits in few_bits.WIDTHS for group, dim in ((8, 16), (32, 64), (64, 64))]


@pytest.mark.parametrize(("bits", "group", "dim"), CASES)
@pytest.mark.parametrize("offset", [0.0, 40.0])
def test_bytes_are_those_of_the_loops(bits: int, group: int, dim: int, offset: float) -> None:
    """Codes, lows and steps share one row: a wrong place would give another group's scale."""
    torch.manual_seed(bits + dim)
    vectors = 3 * torch.randn(7, dim, dtype=torch.float64) + offset
    rows = few_bits.encode(vectors, bits, group)
    back = few_bits.decode(rows, bits, group, dim, torch.float64)
    assert rows.shape == (7, few_bits.row_bytes(dim, bits, group))
    for vector, row, values in zip(vectors.tolist(), rows, back.tolist(), strict=True):
        packed, expected = reference.row(vector, bits, group)
        assert bytes(row.tolist()) == packed
        assert values == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("bits", "dim"), [(2, 12), (2, 20), (4, 14), (2, 16)])
def test_a_vector_alone_is_read_whatever_its_width(bits: int, dim: int) -> None:
    """Behind an odd number of bytes of codes, scales of 2 bytes do not stand where a view may begin."""
    vectors = torch.randn(1, 1, 3, dim, generator=torch.Generator().manual_seed(0))
    rows = few_bits.encode(vectors, bits, dim)
    together = few_bits.decode(rows, bits, dim, dim, torch.float32)
    alone = few_bits.decode(rows[:, :, :1], bits, dim, dim, torch.float32)
    assert torch.equal(alone, together[:, :, :1])


@settings(max_examples=60, deadline=None)
@given(
    bits=st.sampled_from(few_bits.WIDTHS),
    group=st.sampled_from((8, 16, 32)),
    scale=st.floats(1e-3, 1e3),
    offset=st.floats(-5, 5),
    seed=st.integers(0, 10**6),
)
def test_the_error_is_half_a_step_at_most(
    bits: int, group: int, scale: float, offset: float, seed: int
) -> None:
    """Rounded low and step are written down: what they are off comes on top, and no more."""
    generator = torch.Generator().manual_seed(seed)
    vectors = scale * (torch.randn(5, 32, generator=generator, dtype=torch.float64) + offset)
    codes, _, step = few_bits.round_groups(vectors, bits, group)
    back = few_bits.decode(few_bits.encode(vectors, bits, group), bits, group, 32, torch.float64)
    error = (back - vectors).abs().unflatten(-1, (-1, group))
    # float16 has 11 digits: the low is off by a 2048th of itself, the last code by so much of the range; and
    # steps below 6e-5 come in multiples of 2 ** -24.
    slack = vectors.abs().unflatten(-1, (-1, group)).amax(-1, keepdim=True) * 2**-9 + 2**bits * 2**-24
    assert bool((error <= step.double() / 2 + slack).all())
    assert int(codes.max()) < 2**bits


@pytest.mark.parametrize("bits", few_bits.WIDTHS)
def test_packing_loses_nothing(bits: int) -> None:
    codes = torch.randint(0, 2**bits, (3, 4, 64), dtype=torch.uint8)
    packed = few_bits.pack(codes, bits)
    assert packed.shape[-1] == 64 * bits // 8
    assert torch.equal(few_bits.unpack(packed, bits), codes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equal_channels_and_other_types(dtype: torch.dtype) -> None:
    """A step of 0 must not divide; half precision must not add up in half precision."""
    vectors = torch.full((2, 16), 1.5).to(dtype)
    vectors[1] = torch.linspace(-1, 1, 16).to(dtype)
    back = few_bits.decode(few_bits.encode(vectors, 8, 8), 8, 8, 16, dtype)
    assert back.dtype == dtype
    assert torch.equal(back[0], vectors[0])
    assert float((back - vectors).abs().max()) < 0.01


def test_rounding_twice_is_rounding_once() -> None:
    """A promoted entry that is demoted again must not drift."""
    torch.manual_seed(0)
    for bits in few_bits.WIDTHS:
        rows = few_bits.encode(torch.randn(50, 32, dtype=torch.float64), bits, 16)
        back = few_bits.decode(rows, bits, 16, 32, torch.float64)
        assert torch.equal(few_bits.encode(back, bits, 16), rows)
