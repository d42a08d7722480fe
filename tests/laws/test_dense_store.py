"""The dense store against a twin made of lists, under random sequences of everything it can do."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvkeep.cache.dense import DenseStore
from kvkeep.core.decision import KeepDecision

KEY_DIM, VALUE_DIM = 3, 2
Entry = tuple[float, int, float]  # key and value are made of one number each, then position, extra


class Twin(RuleBasedStateMachine):
    """``rows[row][head]`` is a list of entries, oldest first."""

    @initialize(batch=st.integers(1, 3), heads=st.integers(1, 2), capacity=st.integers(0, 6))
    def begin(self, batch: int, heads: int, capacity: int) -> None:
        like = torch.zeros(batch, heads, 1, KEY_DIM)
        self.store = DenseStore(like, like[..., :VALUE_DIM], capacity, extras=("mark",))
        self.heads, self.number = heads, 0
        self.rows: list[list[list[Entry]]] = [[[] for _ in range(heads)] for _ in range(batch)]
        self.seen = [0] * batch

    @rule(data=st.data(), new=st.integers(1, 4))
    def append(self, data: Any, new: int) -> None:
        """New columns, the first of which may be padding in some rows."""
        batch = len(self.rows)
        fresh = data.draw(st.lists(st.integers(0, new), min_size=batch, max_size=batch))
        if data.draw(st.booleans()):
            fresh = [new] * batch
        needed = max(length + count for length, count in zip(self.store.lens, fresh, strict=True))
        if needed > self.store.capacity:
            self.store.resize(needed + data.draw(st.integers(0, 3)))
        first = torch.arange(self.number, self.number + batch * self.heads * new).float()
        self.number += batch * self.heads * new
        numbers = first.view(batch, self.heads, new)
        positions = torch.full((batch, new), -1)
        for row, count in enumerate(fresh):
            positions[row, new - count :] = torch.arange(self.seen[row], self.seen[row] + count)
            for head in range(self.heads):
                for column in range(new - count, new):
                    entry = (float(numbers[row, head, column]), int(positions[row, column]), 0.0)
                    self.rows[row][head].append(entry)
            self.seen[row] += count
        keys = numbers[..., None].expand(-1, -1, -1, KEY_DIM)
        values = -numbers[..., None].expand(-1, -1, -1, VALUE_DIM)
        self.store.append(keys, values, positions, fresh, None)

    @precondition(lambda self: min(self.store.lens) > 0)
    @rule(data=st.data())
    def compact(self, data: Any) -> None:
        """Some rows keep some entries, as many in every head, others in each head."""
        batch = len(self.rows)
        rows = data.draw(
            st.lists(st.integers(0, batch - 1), min_size=1, max_size=batch, unique=True).map(sorted)
        )
        lens = [data.draw(st.integers(1, self.store.lens[row])) for row in rows]
        indices = torch.zeros(len(rows), self.heads, max(lens), dtype=torch.int64)
        for place, (row, length) in enumerate(zip(rows, lens, strict=True)):
            for head in range(self.heads):
                kept = sorted(
                    data.draw(
                        st.lists(
                            st.integers(0, self.store.lens[row] - 1),
                            min_size=length,
                            max_size=length,
                            unique=True,
                        )
                    )
                )
                indices[place, head, :length] = torch.tensor(kept)
                self.rows[row][head] = [self.rows[row][head][index] for index in kept]
        counts = torch.tensor(lens)[:, None].expand(-1, self.heads)
        self.store.compact(rows, KeepDecision(indices, counts), lens)

    @rule(data=st.data())
    def select_rows(self, data: Any) -> None:
        """Beams: rows are copied, dropped and reordered."""
        batch = len(self.rows)
        index = data.draw(st.lists(st.integers(0, batch - 1), min_size=1, max_size=4))
        self.store.select_rows(index)
        self.rows = [[list(head) for head in self.rows[row]] for row in index]
        self.seen = [self.seen[row] for row in index]

    @rule(data=st.data())
    def truncate(self, data: Any) -> None:
        """The newest entries are taken back; positions go on from what is left."""
        removed = data.draw(st.integers(0, min(self.store.lens)))
        self.store.forget_newest(removed)
        self.rows = [[head[: len(head) - removed] for head in heads] for heads in self.rows]
        newest = [[head[-1][1] for head in heads if head] for heads in self.rows]
        self.seen = [max(positions, default=-1) + 1 for positions in newest]

    @rule(spare=st.integers(0, 3))
    def resize(self, spare: int) -> None:
        """Memory is given back, or laid out anew."""
        self.store.resize(self.store.longest + spare)

    @rule(data=st.data(), value=st.floats(-8, 8, width=16))
    def write_extra(self, data: Any, value: float) -> None:
        """A recorder adds to the numbers beside the entries."""
        row = data.draw(st.integers(0, len(self.rows) - 1))
        length = self.store.lens[row]
        self.store.extras["mark"][row, :, :length] = value
        self.rows[row] = [[(n, position, value) for n, position, _ in head] for head in self.rows[row]]

    @invariant()
    def agrees_with_the_lists(self) -> None:
        """Every entry is where the twin says, with its key, value, position and extra number."""
        if not hasattr(self, "store"):
            return
        store = self.store
        store.check_integrity()
        assert store.lens == [len(heads[0]) for heads in self.rows]
        assert store.longest == max(store.lens)
        assert store.even == (len(set(store.lens)) == 1)
        valid = store.valid(store.longest)
        assert valid.sum(-1).tolist() == [[length] * self.heads for length in store.lens]
        for row, heads in enumerate(self.rows):
            for head, entries in enumerate(heads):
                length = len(entries)
                numbers = torch.tensor([entry[0] for entry in entries])[:, None]
                assert torch.equal(store.keys[row, head, :length], numbers.expand(-1, KEY_DIM))
                assert torch.equal(store.values[row, head, :length], -numbers.expand(-1, VALUE_DIM))
                assert store.positions[row, head, :length].tolist() == [entry[1] for entry in entries]
                assert store.extras["mark"][row, head, :length].tolist() == [entry[2] for entry in entries]


Twin.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestDenseStore = Twin.TestCase
