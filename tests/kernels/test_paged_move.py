"""The torch twins of the kernels that move entries, against loops over single entries."""

from __future__ import annotations

import logging
import sys

import numpy as np
import pytest
import torch

from kvkeep.kernels import paged_move
from tests.kernels.paged_cases import Case, Shape, assert_same_bits, case

SHAPES = [
    Shape(held=((4, 0, 7), (1, 9, 2)), page_size=3),
    Shape(held=((5, 3),), page_size=1, extras=2, dtype=torch.bfloat16),
    Shape(held=((40,), (33,)), page_size=16, extras=0, dtype=torch.float16),
]


def slot(some: Case, row: int, head: int, place: int) -> int:
    """Where an entry lies, by the definition of a table."""
    page, rest = divmod(place, some.shape.page_size)
    return int(some.table[row, head, page]) * some.shape.page_size + rest


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_moving_keeps_the_order_of_what_is_kept(shape: Shape) -> None:
    """An entry that ends in another's place would be attended to at the wrong position."""
    some = case(shape)
    indices, counts = some.kept()
    expected = some.copy()
    for row, head in np.ndindex(*counts.shape):
        for place in range(counts[row, head]):
            origin = int(indices[row, head, place])
            for name, tensor in some.pool.items():
                expected[name][slot(some, row, head, place)] = tensor[slot(some, row, head, origin)]
    paged_move.move(some.pool, some.table, indices, counts, shape.page_size)
    assert_same_bits(some.pool, expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gathering_reads_every_head_and_zeros_behind(shape: Shape) -> None:
    """What lies behind a short head must not be what another head once stored."""
    some, entries = case(shape), int(np.array(shape.held).max()) + 1
    found = paged_move.gather(some.pool, some.table, some.held, entries, shape.page_size)
    expected = {
        name: tensor.new_zeros(*some.held.shape, entries, *tensor.shape[1:])
        for name, tensor in some.pool.items()
    }
    for row, head in np.ndindex(*some.held.shape):
        for place in range(some.held[row, head]):
            for name, tensor in some.pool.items():
                expected[name][row, head, place] = tensor[slot(some, row, head, place)]
    assert_same_bits(found, expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_appending_writes_just_the_slots(shape: Shape, transposed: bool) -> None:
    """Left padding must not be stored, nor an extra number of the page's former owner be left."""
    some = case(shape)
    given, slots, columns = some.fresh(2, transposed)
    expected = some.copy()
    for target, column in zip(slots, range(len(slots)) if columns is None else columns, strict=True):
        for name, tensor in expected.items():
            source = given[name].flatten(0, 2)[column] if name in given else torch.tensor(0.0)
            tensor[target] = source.to(tensor.dtype)
    paged_move.append(some.pool, given, slots, columns)
    assert_same_bits(some.pool, expected)


def test_a_triton_that_does_not_work_is_done_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No compiler, no triton, a wrong driver: a slower step, said once, and not the end of a generation."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delitem(sys.modules, "kvkeep.kernels.paged_move_triton", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)  # any import of it raises ImportError
    paged_move.triton_version.cache_clear()
    with caplog.at_level(logging.WARNING, "kvkeep"):
        assert paged_move.triton_version(torch.device("cpu")) is None
        assert paged_move.triton_version(torch.device("cpu")) is None
    paged_move.triton_version.cache_clear()
    assert len(caplog.records) == 1
    assert "plain torch" in caplog.text
