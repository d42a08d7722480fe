"""The mixed-precision store against a twin made of lists, under random sequences of what it does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvkeep.cache import DenseStore, PagedStore, PagePool
from kvkeep.cache.quantized import MixedStore, low_rows
from kvkeep.core.errors import CacheIntegrityError
from kvkeep.core.precision import Precision
from tests.reference import few_bits as reference

DIM, HEADS = 16, 2
PRECISION = Precision(bits=2, key_bits=4, group=8)


def empty(kind: str, batch: int) -> MixedStore[Any]:
    like = torch.zeros(batch, HEADS, 0, DIM, dtype=torch.float64)
    few = low_rows(like, like, PRECISION)
    if kind == "dense":
        return MixedStore(DenseStore(like, like, 0, ("mark",)), DenseStore(*few, 0, ("mark",)), PRECISION)
    pools = [PagePool(*pair, 3, ("mark",)) for pair in ((like, like), few)]
    return MixedStore(*(PagedStore(pool, batch, HEADS) for pool in pools), PRECISION)


def room(store: MixedStore[Any]) -> Any:
    """Dense parts are resized by whoever owns them."""

    def make(full: int, low: int) -> None:
        if isinstance(store.full, DenseStore):
            store.full.resize(max(full, store.full.longest))
            store.low.resize(max(low, store.low.longest))

    return make


class Twin:
    """``rows[row][head]`` is a list of [position, key, value, mark, is low], oldest first."""

    def __init__(self, kind: str, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.batch = int(self.random.integers(1, 4))
        self.kind, self.store = kind, empty(kind, self.batch)
        self.rows: list[list[list[list[Any]]]] = [[[] for _ in range(HEADS)] for _ in range(self.batch)]
        self.seen = [0] * self.batch

    def append(self) -> None:
        new = int(self.random.integers(1, 6))
        fresh = [int(self.random.integers(0, new + 1)) for _ in range(self.batch)]
        keys = torch.from_numpy(self.random.normal(size=(self.batch, HEADS, new, DIM)))
        values = torch.from_numpy(self.random.normal(size=(self.batch, HEADS, new, DIM)))
        marks = torch.from_numpy(self.random.normal(size=(self.batch, HEADS, new))).float()
        positions = torch.full((self.batch, new), -1)
        for row, count in enumerate(fresh):
            positions[row, new - count :] = torch.arange(self.seen[row], self.seen[row] + count)
            for head in range(HEADS):
                for column in range(new - count, new):
                    vectors = keys[row, head, column].tolist(), values[row, head, column].tolist()
                    position, mark = int(positions[row, column]), float(marks[row, head, column])
                    self.rows[row][head].append([position, *vectors, mark, False])
            self.seen[row] += count
        if isinstance(self.store.full, DenseStore):
            longest = max(b + f for b, f in zip(self.store.full.lens, fresh, strict=True))
            self.store.full.resize(max(longest, self.store.full.capacity))
        self.store.full.append(keys, values, positions, fresh, extras={"mark": marks})

    def rearrange(self) -> None:
        rows = sorted(self.random.permutation(self.batch)[: self.random.integers(1, self.batch + 1)].tolist())
        entries = int(self.store.held[rows].max())
        kept = torch.zeros(len(rows), HEADS, entries, dtype=torch.bool)
        full = torch.zeros_like(kept)
        for place, row in enumerate(rows):
            keep = [int(self.random.integers(0, len(head) + 1)) for head in self.rows[row]]
            if self.kind == "dense":
                keep = [min(keep)] * HEADS
            stay = int(self.random.integers(0, min(keep) + 1))
            for head, count in enumerate(keep):
                chosen = self.random.permutation(len(self.rows[row][head]))[:count]
                kept[place, head, chosen] = True
                some = stay if self.kind == "dense" else int(self.random.integers(0, count + 1))
                full[place, head, chosen[:some]] = True
                self.rows[row][head] = [
                    self._moved(entry, bool(full[place, head, index]))
                    for index, entry in enumerate(self.rows[row][head])
                    if kept[place, head, index]
                ]
        self.store.rearrange(rows, kept, full, room(self.store))

    @staticmethod
    def _moved(entry: list[Any], full: bool) -> list[Any]:
        position, key, value, mark, low = entry
        if not full and not low:
            key, value = (
                reference.row(vector, bits, PRECISION.group)[1] for vector, bits in ((key, 4), (value, 2))
            )
        return [position, key, value, mark, not full]

    def merge(self) -> None:
        """New values for some entries, the others' own again: those must not be rounded once more."""
        rows = sorted(self.random.permutation(self.batch)[: self.random.integers(1, self.batch + 1)].tolist())
        values = self.store.padded(rows, "values")["values"].clone()
        for place, row in enumerate(rows):
            for head, held in enumerate(self.rows[row]):
                values[place, head, len(held) :] = 7.0  # behind a head's length anything may stand
                for index, entry in enumerate(held):
                    if self.random.random() < 0.5:
                        continue
                    new = self.random.normal(size=DIM)
                    values[place, head, index] = torch.from_numpy(new)
                    low = reference.row(new.tolist(), 2, PRECISION.group)[1]
                    entry[2] = low if entry[4] else new.tolist()
        before = self.store.low.padded(None, "values")["values"].clone()
        self.store.set_values(rows, values)
        other = [row for row in range(self.batch) if row not in rows]
        assert torch.equal(self.store.low.padded(None, "values")["values"][other], before[other])

    def select(self) -> None:
        index = self.random.integers(0, self.batch, size=int(self.random.integers(1, 4))).tolist()
        self.store.select_rows(index)
        self.rows = [[[list(entry) for entry in head] for head in self.rows[row]] for row in index]
        self.seen, self.batch = [self.seen[row] for row in index], len(index)

    def add(self) -> None:
        entries = self.store.longest
        amount = torch.from_numpy(self.random.normal(size=(self.batch, HEADS, entries))).float()
        self.store.add_extra("mark", amount)
        for row, heads in enumerate(self.rows):
            for head, held in enumerate(heads):
                for index, entry in enumerate(held):
                    entry[3] += float(amount[row, head, index])

    def check(self) -> None:
        store = self.store
        store.check_integrity()
        assert store.held.tolist() == [[len(head) for head in row] for row in self.rows]
        found, low = store.padded(), store.is_low()
        for row, heads in enumerate(self.rows):
            alone = store.padded([row], "values")["values"]
            for head, held in enumerate(heads):
                count = len(held)
                assert found["positions"][row, head, :count].tolist() == [entry[0] for entry in held]
                assert low[row, head, :count].tolist() == [entry[4] for entry in held]
                for index, name in ((1, "keys"), (2, "values"), (3, "extra.mark")):
                    expected = torch.tensor([entry[index] for entry in held], dtype=torch.float64)
                    there = found[name][row, head, :count].double()
                    # Demoted, promoted and demoted again, a value may move by rounding of its last digit.
                    tolerance = 1e-5 if name == "extra.mark" else 1e-9
                    assert torch.allclose(there.flatten(), expected.flatten(), atol=tolerance, rtol=0)
                assert torch.equal(alone[0, head, :count], found["values"][row, head, :count])


@pytest.mark.parametrize("kind", ["dense", "paged"])
@pytest.mark.parametrize("seed", range(12))
def test_the_store_is_its_twin(kind: str, seed: int) -> None:
    """Evictions, demotions, promotions, merges, beams: a wrong slot serves another token's value."""
    twin = Twin(kind, seed)
    twin.append()
    moves = (twin.append, twin.rearrange, twin.select, twin.add, twin.merge)
    for _ in range(14):
        moves[int(twin.random.choice(5, p=[0.35, 0.3, 0.1, 0.1, 0.15]))]()
        twin.check()


@pytest.mark.parametrize("kind", ["dense", "paged"])
def test_values_that_do_not_change_keep_their_bytes(kind: str) -> None:
    """Rounded anew at every eviction, an entry would wander off, merge or no merge."""
    store = empty(kind, 1)
    keys = torch.randn(1, HEADS, 9, DIM, dtype=torch.float64)
    room(store)(9, 0)
    marks = {"mark": torch.zeros(1, HEADS, 9)}
    store.full.append(keys, 3 * keys, torch.arange(9)[None], [9], extras=marks)
    every = torch.ones(1, HEADS, 9, dtype=torch.bool)
    store.rearrange([0], every, every & (torch.arange(9) % 3 == 0), room(store))
    parts = (store.full, store.low)
    before = [{name: tensor.clone() for name, tensor in part.padded(None).items()} for part in parts]
    for _ in range(5):
        store.set_values([0], store.padded([0], "values")["values"])
    for part, was in zip(parts, before, strict=True):
        for name, tensor in part.padded(None).items():
            assert torch.equal(tensor, was[name])


def test_an_entry_in_both_parts_is_found() -> None:
    store = empty("paged", 1)
    keys = torch.randn(1, HEADS, 3, DIM, dtype=torch.float64)
    store.full.append(keys, keys, torch.arange(3)[None], [3])
    few = (each.new_zeros(1, HEADS, 1, each.shape[-1]) for each in low_rows(keys, keys, PRECISION))
    store.low.append(*few, torch.ones(1, 1, dtype=torch.int64), [1])
    with pytest.raises(CacheIntegrityError, match="both in full precision and in few bits"):
        store.check_integrity()
