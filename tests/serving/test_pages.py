"""A layer's blocks against a dictionary of entries."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvkeep.core.errors import CacheIntegrityError
from kvkeep.serving.layout import Layout
from kvkeep.serving.pages import LayerPages, OrderedPages
from tests.serving.storage import ORDERS, Kernel

BLOCKS, HEADS, SLOTS, DIM, QUERY_HEADS, PER_BLOCK = 7, 2, 4, 6, 4, 3


def make(order: str, per_block: int = PER_BLOCK) -> tuple[LayerPages, Kernel]:
    kernel = Kernel(order, SLOTS, DIM)
    layout = Layout.learn(kernel.write, slots=SLOTS, dim=DIM, dtype=torch.float32, device=torch.device("cpu"))
    cache = torch.full((BLOCKS, HEADS, SLOTS, 2 * DIM), torch.nan)  # as vLLM may hand it over
    return LayerPages(cache, layout, QUERY_HEADS, per_block), kernel


def fill(pages: LayerPages, kernel: Kernel, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Write every slot of one row; its keys and values ``[kv_heads, entries, dim]``."""
    count = blocks.numel() * SLOTS
    keys, values = torch.randn(count, HEADS, DIM), torch.randn(count, HEADS, DIM)
    slots = (blocks[:, None] * SLOTS + torch.arange(SLOTS)).flatten()
    kernel.write(keys, values, pages.cache, slots)
    return keys.transpose(0, 1), values.transpose(0, 1)


@pytest.mark.parametrize("order", ORDERS)
def test_entries_move_within_their_head(order: str) -> None:
    """A survivor would be lost, or land in another head or request."""
    pages, kernel = make(order)
    rows = torch.tensor([[5, 1], [2, 6]])
    keys, values = map(torch.stack, zip(*(fill(pages, kernel, row) for row in rows), strict=True))
    others = pages.cache[3].clone()
    # Two entries change places in one head; in another one moves onto the place that a second leaves.
    source = torch.tensor([[[7, 0], [6, 6]], [[2, 5], [4, 3]]])
    target = torch.tensor([[[0, 7], [1, 1]], [[5, 2], [0, 4]]])
    table = pages.table(rows)
    pages.move(table, source, target)
    for row in range(2):
        for head in range(HEADS):
            index = torch.arange(2 * SLOTS)
            index[target[row, head]] = source[row, head]
            keys[row, head], values[row, head] = keys[row, head][index], values[row, head][index]
    assert torch.equal(pages.read("keys", table), keys)
    assert torch.equal(pages.read("values", table), values)
    assert torch.equal(pages.cache[3].isnan(), others.isnan())


def test_heads_may_hold_pages_of_any_block() -> None:
    """Where heads differ in length, one would read the pages of another."""
    pages, kernel = make("side by side")
    rows = torch.tensor([5, 1, 2])
    keys, _ = fill(pages, kernel, rows)
    # Head 0 also holds the second block's page of head 1, which has only its own first and last.
    table = torch.tensor([[[5 * HEADS, 1 * HEADS + 1], [5 * HEADS + 1, 2 * HEADS + 1]]])
    mine = [torch.cat([keys[0, :SLOTS], keys[1, SLOTS : 2 * SLOTS]]), keys[1, [0, 1, 2, 3, 8, 9, 10, 11]]]
    assert torch.equal(pages.read("keys", table)[0], torch.stack(mine))
    assert torch.equal(pages.by_page()[table[0, 0, 1], 0], pages.cache[1, 1])


def test_ordered_entries_follow_their_slots() -> None:
    """A view would show one head's entries in another one's order."""
    pages, kernel = make("transposed keys")
    blocks = torch.tensor([[4, 2]])
    keys, values = fill(pages, kernel, blocks[0])
    order = torch.stack([torch.randperm(2 * SLOTS)[:5] for _ in range(HEADS)])[None]
    seen = OrderedPages(pages, pages.table(blocks), order).padded(None, "keys", "values")
    for head in range(HEADS):
        assert torch.equal(seen["keys"][0, head], keys[head, order[0, head]])
        assert torch.equal(seen["values"][0, head], values[head, order[0, head]])


def test_positions_stand_beside_their_slots() -> None:
    """A policy would take old tokens for new ones."""
    pages, _ = make("plain")
    positions = torch.randint(0, 10**6, (2, HEADS, 2 * SLOTS))
    table = pages.table(torch.tensor([[6, 3], [1, 5]]))
    pages.write_positions(table, positions)
    assert torch.equal(pages.read_positions(table), positions)
    assert torch.equal(pages.read_positions(table[..., :1]), positions[..., :SLOTS])


def test_recorded_queries_come_back_and_touch_no_entry() -> None:
    """A policy would score by another token's queries, or the model attend to them."""
    pages, kernel = make("interleaved")
    blocks = torch.tensor([2, 3])
    keys, values = fill(pages, kernel, blocks)
    queries = torch.randn(5, QUERY_HEADS, DIM)
    pages.record(torch.tensor([4, 4, 6, 4, 6]), torch.tensor([0, 2, 1, 1, 0]), queries)
    found = pages.recorded(torch.tensor([[4, 4], [6, 6]]), torch.tensor([[2, 0], [0, 1]]))
    assert torch.equal(found, torch.stack([queries[[1, 0]], queries[[4, 2]]]).transpose(1, 2))
    assert torch.equal(pages.read("keys", pages.table(blocks[None]))[0], keys)
    assert torch.equal(pages.read("values", pages.table(blocks[None]))[0], values)


def test_queries_without_room_are_refused() -> None:
    """A plug-in that forgets to lay out room would crash without saying why."""
    pages, _ = make("plain", per_block=0)
    with pytest.raises(CacheIntegrityError, match="did not ask for any"):
        pages.record(torch.tensor([1]), torch.tensor([0]), torch.zeros(1, QUERY_HEADS, DIM))
