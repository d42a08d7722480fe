"""Choosing blocks: against plain loops, at ties, at infinities, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import kvkeep
from kvkeep.cache.dense import DenseStore
from kvkeep.core.errors import BudgetError, ConfigError
from kvkeep.core.selector import ReadDecision, ReadView, Selector
from kvkeep.core.traits import Reads
from kvkeep.engine.block_bounds import BlockBounds
from kvkeep.engine.reading import attend_to, count_read, entries_of
from kvkeep.scoring.block_bound import block_bound
from tests.reference import quest

PAGE, HEADS, KV, DIM = 4, 4, 2, 6


def random(*shape: int, seed: int = 0) -> Tensor:
    """Numbers that need no global state."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def stored(lens: tuple[int, ...], *, seed: int = 0) -> DenseStore:
    """Rows of these lengths; what is behind them is rubbish."""
    keys, values = random(len(lens), KV, max(lens), DIM, seed=seed), random(len(lens), KV, max(lens), DIM)
    store = DenseStore(keys, values, max(lens) + 5)
    store.keys.fill_(99.0)
    positions = torch.arange(max(lens)).expand(len(lens), -1)
    for row, length in enumerate(lens):
        store.keys[row, :, :length] = keys[row, :, :length]
        store.values[row, :, :length] = values[row, :, :length]
        store.positions[row, :, :length] = positions[row, :length].to(torch.int32)
    store.lens = list(lens)
    return store


def view_of(store: DenseStore, policy: Selector, queries: Tensor) -> ReadView:
    """What the engine would show."""
    bounds = BlockBounds(store.keys, policy.reads.block)
    bounds.catch_up(store)
    blocks = -(-store.longest // policy.reads.block)
    return ReadView(
        layer=0,
        queries=queries,
        lens=torch.tensor(store.lens),
        blocks=blocks,
        kv_heads=KV,
        reads=policy.reads,
        recorded={"low": bounds.low[:, :, :blocks], "high": bounds.high[:, :, :blocks]},
    )


def listed(decision: ReadDecision) -> list[list[list[int]]]:
    """Blocks per row and head."""
    return [
        [head[: int(length)].tolist() for head, length in zip(row, lengths, strict=True)]
        for row, lengths in zip(decision.blocks, decision.lengths, strict=True)
    ]


@pytest.mark.parametrize("lens", [(37,), (40, 3, 21), (16, 17, 1)])
def test_quest_reads_the_pages_of_the_reference(lens: tuple[int, ...]) -> None:
    """Pages, and then attention on them, in plain numbers."""
    policy = kvkeep.Quest(token_budget=12, page=PAGE, dense_layers=0)
    store, queries = stored(lens), random(len(lens), HEADS, DIM, seed=3)
    view = view_of(store, policy, queries)
    decision = policy.choose(view)
    slots, there = entries_of(decision, PAGE, view.lens)
    output = attend_to(queries[:, :, None], store.keys, store.values, slots, there, None)
    for row, length in enumerate(lens):
        for head in range(HEADS):
            keys = store.keys[row, head // 2, :length].tolist()
            values = store.values[row, head // 2, :length].tolist()
            query = queries[row, head].tolist()
            pages = quest.pages(query, keys, page=PAGE, count=3)
            assert listed(decision)[row][head] == pages
            expected = quest.attend(query, keys, values, pages, PAGE)
            assert output[row, 0, head].tolist() == pytest.approx(expected, abs=1e-12)


def test_the_bound_is_one() -> None:
    """No key of a page can match better than its bound says."""
    keys, queries = random(1, KV, 5, PAGE, DIM), random(1, HEADS, DIM, seed=1)
    bound = block_bound(queries, keys.amin(3), keys.amax(3))
    logits = torch.einsum("bkgd,bknpd->bkgnp", queries.view(1, KV, 2, DIM), keys).flatten(1, 2)
    assert bool((logits.amax(-1) <= bound + 1e-5).all())
    single = block_bound(queries, keys[:, :, :, 0], keys[:, :, :, 0])
    torch.testing.assert_close(single, logits[..., 0].float())  # one key bounds itself exactly


def test_ties_go_to_the_oldest_and_the_newest_is_always_read() -> None:
    """Equal bounds must not make the outcome a matter of the device."""
    policy = kvkeep.Quest(token_budget=12, page=PAGE)
    store = stored((40,))
    store.keys.fill_(1.0)
    decision = policy.choose(view_of(store, policy, torch.ones(1, HEADS, DIM, dtype=torch.float64)))
    assert listed(decision) == [[[0, 1, 9]] * HEADS]


@pytest.mark.parametrize("extreme", [math.inf, -math.inf, 0.0])
def test_extreme_rates_choose_stored_blocks_only(extreme: float) -> None:
    """Infinite bounds beside empty blocks, whose own bounds are infinite or NaN."""
    policy = kvkeep.Quest(token_budget=12, page=PAGE)
    store = stored((40, 5))
    view = view_of(store, policy, torch.full((2, HEADS, DIM), extreme, dtype=torch.float64))
    long, short = listed(policy.choose(view))
    assert all(len(head) == 3 and head[-1] == 9 for head in long)
    assert short == [[0, 1]] * HEADS


def test_bounds_kept_up_are_those_of_all_keys() -> None:
    """One by one, several at once, uneven rows, rows taken back: as if computed anew."""
    lens = [7, 2, 12]
    store = stored((40, 40, 40))
    bounds = BlockBounds(store.keys, PAGE)

    def check() -> None:
        bounds.catch_up(store)
        for row, length in enumerate(store.lens):
            for place in range(-(-length // PAGE)):
                page = store.keys[row, :, place * PAGE : min(length, (place + 1) * PAGE)]
                assert torch.equal(bounds.low[row, :, place], page.amin(1))
                assert torch.equal(bounds.high[row, :, place], page.amax(1))
            assert bool((bounds.low[row, :, -(-length // PAGE) :] == math.inf).all())

    store.lens = lens
    check()
    for more in ([1, 1, 1], [1, 1, 1], [3, 0, 1], [1, 1, 1], [0, 9, 0], [1, 1, 1]):
        store.lens = [length + new for length, new in zip(store.lens, more, strict=True)]
        check()
    for fewer in ([2, 2, 2], [7, 3, 8]):
        store.lens = [length - old for length, old in zip(store.lens, fewer, strict=True)]
        bounds.forget(store.lens)
        store.lens = [length + 1 for length in store.lens]
        check()
    index = torch.tensor([2, 0, 0])
    store.select_rows(index.tolist())
    bounds.select_rows(index)
    store.lens = [length + 1 for length in store.lens]
    check()


def test_what_is_read_is_counted_once_per_kv_head() -> None:
    """Two query heads that read the same page fetch it once."""
    blocks = torch.tensor([[[0, 2], [0, 3], [1, 3], [1, 3]]])
    lengths = torch.tensor([[2, 2, 2, 1]])
    count = count_read(ReadDecision(blocks, lengths), PAGE, torch.tensor([14]), 4, KV)
    assert count.distinct.tolist() == [[4 + 4 + 2, 4 + 2]]
    assert count.by_query.tolist() == [[(8 + 6) / 2, (6 + 4) / 2]]


def test_a_need_that_is_not_declared_cannot_be_read() -> None:
    """What is not declared is not recorded, so a selector must not find it by chance."""
    policy = kvkeep.Quest(token_budget=64)
    with pytest.raises(ConfigError, match=r"do not declare Reads\(gates=True\)"):
        _ = view_of(stored((20,)), policy, random(1, HEADS, DIM)).gate_logits


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token_budget": 8}, "quest: a token budget of 8 is less than one block of 16 entries"),
        ({"token_budget": 2.5}, "quest: token_budget 2.5 is not a whole number"),
        ({"dense_layers": -1}, "quest: dense_layers -1 is negative"),
        ({"page": 0}, "quest: blocks of 0 entries hold nothing"),
        ({"least_pages": 0}, "quest: least_pages 0 is below 1 page"),
    ],
)
def test_wrong_numbers_are_refused(options: dict[str, Any], message: str) -> None:
    """Before a model is loaded, and by name."""
    with pytest.raises((BudgetError, ConfigError), match=message):
        kvkeep.Quest(**options)


def test_a_selector_evicts_nothing_and_says_so() -> None:
    """Its budget is not one of entries kept."""
    policy = kvkeep.policy("quest", token_budget=128)
    assert not policy.bounded
    assert policy.request == "everything stored, 128 entries read"
    assert policy.traits.reads == Reads(block=16, chosen_by="query", bounds=True, dense_layers=2)
    with pytest.raises(ConfigError, match="keeps everything, so there is nothing to"):
        kvkeep.policy("quest + sample", token_budget=128)
