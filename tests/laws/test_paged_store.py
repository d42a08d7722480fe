"""The paged store against a twin made of lists, under random sequences of everything it can do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvkeep.cache import PagedStore, PagePool
from kvkeep.core.decision import KeepDecision
from kvkeep.core.errors import CacheIntegrityError
from kvkeep.kernels.paged_attention import paged_attention, paged_attention_torch

KEY_DIM, VALUE_DIM = 3, 2
Entry = tuple[float, int, float]  # key and value are made of one number each, then position, extra


class Twin(RuleBasedStateMachine):
    """Two layers on one pool: ``layers[layer][row][head]`` is a list of entries, oldest first."""

    @initialize(batch=st.integers(1, 3), heads=st.integers(1, 3), size=st.integers(1, 5))
    def begin(self, batch: int, heads: int, size: int) -> None:
        like = torch.zeros(1, KEY_DIM, dtype=torch.float64)
        self.pool = PagePool(like, like[..., :VALUE_DIM], size, extras=("mark",))
        self.stores = [PagedStore(self.pool, batch, heads) for _ in range(2)]
        self.heads, self.number = heads, 1
        self.layers: list[list[list[list[Entry]]]] = [
            [[[] for _ in range(heads)] for _ in range(batch)] for _ in range(2)
        ]
        self.seen = [[0] * batch, [0] * batch]

    @rule(data=st.data(), layer=st.integers(0, 1), new=st.integers(1, 6), marked=st.booleans())
    def append(self, data: Any, layer: int, new: int, marked: bool) -> None:
        """New columns, the first of which may be padding in some rows."""
        rows, seen = self.layers[layer], self.seen[layer]
        batch = len(rows)
        fresh = data.draw(st.lists(st.integers(0, new), min_size=batch, max_size=batch))
        if data.draw(st.booleans()):
            fresh = [new] * batch
        total = batch * self.heads * new
        numbers = torch.arange(self.number, self.number + total).double().view(batch, self.heads, new)
        self.number += total
        positions = torch.full((batch, new), -1)
        for row, count in enumerate(fresh):
            positions[row, new - count :] = torch.arange(seen[row], seen[row] + count)
            for head in range(self.heads):
                for column in range(new - count, new):
                    number = float(numbers[row, head, column])
                    rows[row][head].append((number, int(positions[row, column]), number * marked))
            seen[row] += count
        keys = numbers[..., None].expand(-1, -1, -1, KEY_DIM)
        values = -numbers[..., None].expand(-1, -1, -1, VALUE_DIM)
        extras = {"mark": numbers.float()} if marked else None
        self.stores[layer].append(keys, values, positions, fresh, extras)

    @rule(data=st.data(), layer=st.integers(0, 1))
    def compact(self, data: Any, layer: int) -> None:
        """Some rows keep some entries, as many in each head as it likes, none included."""
        rows = self.layers[layer]
        chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), unique=True, min_size=1))
        kept = [
            [sorted(data.draw(st.sets(st.integers(0, len(head) - 1)))) if head else [] for head in rows[row]]
            for row in chosen
        ]
        width = max(len(head) for row in kept for head in row)
        indices = torch.zeros(len(chosen), self.heads, width, dtype=torch.int64)
        for place, heads in enumerate(kept):
            for head, entries in enumerate(heads):
                indices[place, head, : len(entries)] = torch.tensor(entries, dtype=torch.int64)
                rows[chosen[place]][head] = [rows[chosen[place]][head][entry] for entry in entries]
        lengths = torch.tensor([[len(head) for head in row] for row in kept])
        self.stores[layer].compact(chosen, KeepDecision(indices, lengths))

    @rule(data=st.data())
    def reorder(self, data: Any) -> None:
        """Beams: rows are dropped, repeated, and change places, in all layers alike."""
        batch = len(self.layers[0])
        index = data.draw(st.lists(st.integers(0, batch - 1), min_size=1, max_size=4))
        for layer, store in enumerate(self.stores):
            store.select_rows(index)
            self.layers[layer] = [[list(head) for head in self.layers[layer][row]] for row in index]
            self.seen[layer] = [self.seen[layer][row] for row in index]

    @rule(data=st.data(), layer=st.integers(0, 1))
    def forget_newest(self, data: Any, layer: int) -> None:
        """The newest entries are taken back; positions go on from what is left."""
        store, rows = self.stores[layer], self.layers[layer]
        removed = data.draw(st.integers(0, int(store.held.min())))
        store.forget_newest(removed)
        self.layers[layer] = [[head[: len(head) - removed] for head in heads] for heads in rows]
        newest = [[head[-1][1] for head in heads if head] for heads in self.layers[layer]]
        self.seen[layer] = [max(positions, default=-1) + 1 for positions in newest]

    @rule(spare=st.integers(0, 4))
    def grow(self, spare: int) -> None:
        """More pages than are needed."""
        self.pool.grow(self.pool.capacity + spare)

    @rule(spare=st.integers(0, 3))
    def shrink(self, spare: int) -> None:
        """Fewer pages, moved together."""
        before, wanted = self.pool.capacity, self.pool.used + spare
        self.pool.shrink(wanted)
        assert self.pool.capacity == min(before, wanted)
        assert self.pool.keys.shape[0] == self.pool.capacity + 1

    @precondition(lambda self: self.number > 1)
    @rule(data=st.data(), layer=st.integers(0, 1))
    def add_to_extra(self, data: Any, layer: int) -> None:
        """A number per entry goes up by the entry's place."""
        store, rows = self.stores[layer], self.layers[layer]
        amount = torch.arange(store.longest).expand(store.batch, store.heads, -1).float()
        store.add_extra("mark", amount)
        self.layers[layer] = [
            [[(n, p, mark + place) for place, (n, p, mark) in enumerate(head)] for head in heads]
            for heads in rows
        ]

    @rule(layer=st.integers(0, 1))
    def pack_and_unpack(self, layer: int) -> None:
        """Through a file and back, into other pages."""
        store = self.stores[layer]
        packed, held = store.packed(), store.held
        assert len(packed["keys"]) == held.sum()
        copy = PagedStore(self.pool, store.batch, store.heads)
        copy.unpack({name: tensor.clone() for name, tensor in packed.items()}, held)
        store.forget_newest(0)
        store.compact(
            range(store.batch),
            KeepDecision(
                torch.zeros(store.batch, store.heads, 0, dtype=torch.int64),
                torch.zeros(store.batch, store.heads, dtype=torch.int64),
            ),
        )
        self.pool.stores.remove(store)
        self.pool.stores.remove(copy)
        self.pool.stores.insert(layer, copy)
        self.stores[layer] = copy

    @invariant()
    def same_entries(self) -> None:
        """Every head holds what the twin says, in order; the pool's pages add up; attention agrees."""
        if not hasattr(self, "stores"):
            return
        self.pool.check_integrity()
        for store, rows in zip(self.stores, self.layers, strict=True):
            lengths = [[len(head) for head in heads] for heads in rows]
            assert store.held.tolist() == lengths
            stored, valid = store.padded(), store.valid(store.longest)
            assert valid.sum(-1).tolist() == lengths
            for row, heads in enumerate(rows):
                for head, entries in enumerate(heads):
                    count = len(entries)
                    numbers = [number for number, _, _ in entries]
                    keys, values = stored["keys"][row, head], stored["values"][row, head]
                    assert keys[:count].tolist() == [[number] * KEY_DIM for number in numbers]
                    assert values[:count].tolist() == [[-number] * VALUE_DIM for number in numbers]
                    assert stored["positions"][row, head, :count].tolist() == [p for _, p, _ in entries]
                    assert stored["extra.mark"][row, head, :count].tolist() == [mark for *_, mark in entries]
                    assert not keys[count:].any(), "padding reads zeros"
            self._same_attention(store, stored, valid)

    def _same_attention(
        self, store: PagedStore, stored: dict[str, torch.Tensor], valid: torch.Tensor
    ) -> None:
        """Both kernels against a plain masked softmax; a head that holds nothing gives zeros."""
        sequences = store.batch * store.heads
        query = torch.linspace(-1, 1, sequences * 2 * KEY_DIM, dtype=torch.float64).view(
            sequences, 2, KEY_DIM
        )
        logits = query @ stored["keys"].flatten(0, 1).transpose(1, 2) * 0.01
        shares = logits.masked_fill(~valid.flatten(0, 1)[:, None], float("-inf")).softmax(-1).nan_to_num()
        expected = shares @ stored["values"].flatten(0, 1)
        for attend in (paged_attention, paged_attention_torch):
            output = attend(
                query,
                self.pool.keys,
                self.pool.values,
                store.table.reshape(sequences, -1),
                store.held.reshape(-1),
                0.01,
            )
            assert float((output - expected).abs().max()) <= 1e-9 * max(1.0, float(expected.abs().max()))


TestPagedStore = Twin.TestCase
TestPagedStore.settings = settings(
    max_examples=100, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_the_check_notices_a_page_with_two_owners() -> None:
    like = torch.zeros(1, KEY_DIM)
    pool = PagePool(like, like, 2)
    store = PagedStore(pool, 1, 2)
    store.append(torch.ones(1, 2, 3, KEY_DIM), torch.ones(1, 2, 3, KEY_DIM), torch.arange(3)[None], [3])
    pool.check_integrity()
    store.table[0, 1] = store.table[0, 0]
    with pytest.raises(CacheIntegrityError, match="each once"):
        pool.check_integrity()


def test_the_check_notices_entries_out_of_order() -> None:
    like = torch.zeros(1, KEY_DIM)
    pool = PagePool(like, like, 2)
    store = PagedStore(pool, 1, 1)
    keys = torch.ones(1, 1, 3, KEY_DIM)
    store.append(keys, keys, torch.tensor([[0, 2, 1]]), [3])
    with pytest.raises(CacheIntegrityError, match="ascend"):
        store.check_integrity()


def test_a_long_head_is_cut_between_threads() -> None:
    """Shares of one sequence that several threads computed are merged: the result does not depend on them."""
    generator = torch.Generator().manual_seed(0)
    pool_keys = torch.randn(41, 4, 8, generator=generator, dtype=torch.float64)
    pool_values = torch.randn(41, 4, 8, generator=generator, dtype=torch.float64)
    lens = np.array([130, 1, 0, 9])
    table, begin = np.zeros((4, 33), np.int32), 1
    for sequence, length in enumerate(lens):
        pages = -(-length // 4)
        table[sequence, :pages] = np.arange(begin, begin + pages)
        begin += pages
    query = torch.randn(4, 3, 8, generator=generator, dtype=torch.float64) * 3
    before = torch.get_num_threads()
    try:
        outputs = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            outputs.append(paged_attention(query, pool_keys, pool_values, table, lens, 0.3))
    finally:
        torch.set_num_threads(before)
    expected = paged_attention_torch(query, pool_keys, pool_values, table, lens, 0.3)
    for output in outputs:
        assert float((output - expected).abs().max()) < 1e-12
        assert not output[2].any()
