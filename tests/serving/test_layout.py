"""The order of a page, learned from the kernel that writes it."""

from __future__ import annotations

import pytest
import torch

from kvkeep.core.errors import CacheIntegrityError
from kvkeep.serving.layout import Layout
from tests.serving.storage import ORDERS, Kernel

SLOTS, DIM = 16, 64  # more numbers than bfloat16 tells apart


def learn(kernel: Kernel, dtype: torch.dtype = torch.float32) -> Layout:
    return Layout.learn(
        kernel.write, slots=kernel.slots, dim=kernel.dim, dtype=dtype, device=torch.device("cpu")
    )


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_order_is_found(order: str, dtype: torch.dtype) -> None:
    """Policies would score numbers mixed from several tokens."""
    kernel = Kernel(order, SLOTS, DIM)
    layout = learn(kernel, dtype)
    assert torch.equal(layout.keys.at, kernel.keys)
    assert torch.equal(layout.values.at, kernel.values)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("size", [(1, 64), (2, 2), (4, 8)])
def test_a_view_shows_the_entries(order: str, size: tuple[int, int]) -> None:
    """The fast way to read pages would read other numbers than the slow one."""
    if order == "interleaved" and 1 in size:
        return
    kernel = Kernel(order, *size)
    layout = learn(kernel)
    cache = torch.randn(6, 1, size[0], 2 * size[1])
    pages = cache.view(6, -1)[2:]  # not at the start of its storage
    for offsets, at in ((layout.keys, kernel.keys), (layout.values, kernel.values)):
        entries = torch.stack([page[at.flatten()].view(size) for page in pages])
        seen = offsets.view(pages)
        assert (seen is None) == (offsets.steps is None)
        if seen is not None:
            assert torch.equal(seen, entries)
        if offsets.rows is not None:
            first, step = offsets.rows
            rows = pages.reshape(4, -1, size[1])[:, first :: step or 1][:, : size[0]]
            assert torch.equal(rows, entries)


@pytest.mark.parametrize(
    ("order", "steps", "rows"),
    [
        ("plain", [(DIM, 1), (DIM, 1)], [(0, 1), (SLOTS, 1)]),
        ("side by side", [(2 * DIM, 1), (2 * DIM, 1)], [(0, 2), (1, 2)]),
        ("transposed keys", [(1, SLOTS), (DIM, 1)], [None, (SLOTS, 1)]),
        ("scrambled", [None, None], [None, None]),
    ],
)
def test_even_orders_are_known(order: str, steps: list[object], rows: list[object]) -> None:
    """Ordinary layouts would be read number by number, many times slower."""
    layout = learn(Kernel(order, SLOTS, DIM))
    assert [layout.keys.steps, layout.values.steps] == steps
    assert [layout.keys.rows, layout.values.rows] == rows


def test_a_quantizing_kernel_is_refused() -> None:
    """Rounded numbers would look like a strange order, and be read as another one."""
    kernel = Kernel("plain", SLOTS, DIM)

    def rough(key, value, cache, slots):  # type: ignore[no-untyped-def]
        kernel.write(key // 2 * 2, value, cache, slots)

    with pytest.raises(CacheIntegrityError, match="in a way that kvkeep cannot read"):
        Layout.learn(rough, slots=SLOTS, dim=DIM, dtype=torch.float32, device=torch.device("cpu"))
