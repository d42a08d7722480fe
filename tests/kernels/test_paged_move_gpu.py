"""The kernels that move entries on a real GPU, where threads race: the same bits as their twins."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvkeep.kernels import paged_move
from tests.kernels.paged_cases import Shape, assert_same_bits, case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
SHAPES = [
    Shape(held=((700, 0, 33), (1, 512, 64)), page_size=32, key_dim=64, value_dim=64, dtype=torch.bfloat16),
    Shape(held=((300, 301),), page_size=1, key_dim=80, value_dim=7, dtype=torch.float16, extras=2),
    Shape(held=((90,), (1000,)), page_size=16, key_dim=320, value_dim=256, extras=0),
]


@pytest.fixture(autouse=True)
def triton_works() -> None:
    """Else the twins would be compared with themselves."""
    pytest.importorskip("triton", reason="triton is not installed")
    assert paged_move.triton_version(torch.device("cuda", torch.cuda.current_device())) is not None


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_move(shape: Shape) -> None:
    """A thread that stores before another has read would be seen here, some of the time."""
    for seed in range(20):
        some = case(replace(shape, seed=seed), "cuda")
        twin = some.copy()
        indices, counts = some.kept()
        paged_move.move(some.pool, some.table, indices, counts, shape.page_size)
        paged_move.move_torch(twin, some.table, indices, counts, shape.page_size)
        assert_same_bits(some.pool, twin)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gather(shape: Shape) -> None:
    """One launch for all tensors."""
    some = case(shape, "cuda")
    entries = int(some.held.max())
    ours = paged_move.gather(some.pool, some.table, some.held, entries, shape.page_size)
    twin = paged_move.gather_torch(some.pool, some.table, some.held, entries, shape.page_size)
    assert_same_bits(ours, twin)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_append(shape: Shape, transposed: bool) -> None:
    """Sources with the strides that a model leaves them."""
    some = case(shape, "cuda")
    twin = some.copy()
    given, slots, columns = some.fresh(5, transposed)
    paged_move.append(some.pool, given, slots, columns)
    paged_move.append_torch(twin, given, slots, columns)
    assert_same_bits(some.pool, twin)
