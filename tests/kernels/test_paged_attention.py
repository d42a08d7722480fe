"""Paged attention where numbers are not finite, types differ, or numba is there and does not work."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from kvkeep.kernels import paged_attention as kernels

Attend = Callable[..., torch.Tensor]
TABLE, LENS = np.array([[1, 2]], np.int32), np.array([7])


@pytest.fixture
def fresh_choice() -> Iterator[None]:
    """Whether numba works is asked once a process: forget the answer before and after."""
    kernels.compiled_kernel.cache_clear()
    yield
    kernels.compiled_kernel.cache_clear()


def pages(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A query ``[1, 2, 4]`` and a pool of two full pages behind the empty one."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 2, 4, generator=generator, dtype=dtype)
    keys, values = torch.randn(2, 3, 4, 4, generator=generator, dtype=dtype)
    return query, keys, values


@pytest.mark.parametrize("attend", [kernels.paged_attention, kernels.paged_attention_torch])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_query_that_is_not_finite_gives_nan(attend: Attend, bad: float) -> None:
    """Zeros in its place would turn an overflow in the model into fluent nonsense that nobody can trace."""
    query, keys, values = pages()
    query[0, 1, 2] = bad
    output = attend(query, keys, values, TABLE, LENS, 0.5)
    assert output[0, 1].isnan().all()
    assert output[0, 0].isfinite().all()


@pytest.mark.parametrize("attend", [kernels.paged_attention, kernels.paged_attention_torch])
def test_one_key_that_is_nan_gives_nan(attend: Attend) -> None:
    """As in the stock softmax."""
    query, keys, values = pages()
    keys[1, 3, 0] = float("nan")
    assert attend(query, keys, values, TABLE, LENS, 0.5).isnan().all()


def test_types_that_differ_are_attended_to() -> None:
    """Under autocast keys are rotated in float32 while values stay in half the bits."""
    query, keys, values = pages()
    output = kernels.paged_attention(query, keys, values.bfloat16(), TABLE, LENS, 0.5)
    expected = kernels.paged_attention_torch(query, keys, values.bfloat16().float(), TABLE, LENS, 0.5)
    torch.testing.assert_close(output, expected)


def test_numba_that_cannot_be_imported_is_done_without(
    fresh_choice: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A numba that refuses the installed numpy raises on import: that must not stop a generation."""
    monkeypatch.delitem(sys.modules, "kvkeep.kernels.paged_attention_cpu", raising=False)
    monkeypatch.setitem(sys.modules, "numba", None)  # any import of it raises ImportError
    query, keys, values = pages()
    with caplog.at_level(logging.WARNING, "kvkeep"):
        output = kernels.paged_attention(query, keys, values, TABLE, LENS, 0.5)
    assert torch.equal(output, kernels.paged_attention_torch(query, keys, values, TABLE, LENS, 0.5))
    assert "kvkeep[paged]" in caplog.text
    assert "numba" in caplog.text
