"""A layer that stores everything and reads what a selector chooses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from kvkeep.core.arrays import IntArray
from kvkeep.core.errors import UnsupportedError
from kvkeep.core.selector import ReadDecision, ReadView, Selector
from kvkeep.core.traits import Reads
from kvkeep.engine.block_bounds import BlockBounds, BlockIndex
from kvkeep.engine.block_gate_keys import BlockGateKeys
from kvkeep.engine.dense_layer import DenseLayer
from kvkeep.engine.handle import LayerHandle
from kvkeep.engine.layer import Attend
from kvkeep.engine.reading import attend_to, count_read, entries_of
from kvkeep.engine.step import Step

# What a stock attention function may be told that reading a part of the entries does not know.
_UNKNOWN = ("s_aux", "softcap")


class SparseLayer(DenseLayer):
    """Stores in a dense store, reads blocks of it.

    A decode step reads what the selector chooses. Everything else is attended to as ever: the prompt, several
    tokens at once, the first layers of a selector that begins later, and sequences so short that all of
    their blocks are chosen.
    """

    def forget(self) -> None:
        """Back to the state before the first token."""
        super().forget()
        self.indexes: list[BlockIndex] = []  # made with the first entries
        self.decision: ReadDecision | None = None  # of the newest forward; None: everything was read

    @property
    def reads(self) -> Reads:
        """What the selector declared."""
        return cast(Reads, self.cache.traits.reads)

    @property
    def sparse(self) -> bool:
        """Whether this layer reads less than everything."""
        return self.place >= self.reads.dense_layers

    def _append(self, handle: LayerHandle, step: Step, extras: dict[str, Tensor] | None) -> None:
        super()._append(handle, step, extras)
        if not self.sparse:
            return
        if not self.indexes:  # also after entries were read from a file
            self.indexes = self._make_indexes(handle.keys)
        for index in self.indexes:
            index.catch_up(self.stored)

    def _make_indexes(self, like: Tensor) -> list[BlockIndex]:
        """What the selector asked to be kept per block."""
        cache, made = self.cache, list[BlockIndex]()
        if self.reads.bounds:
            made.append(BlockBounds(like, self.reads.block))
        if cache.block_gates is not None and cache.rope is not None:
            made.append(BlockGateKeys(like, cache.block_gates, self.index, cache.rope))
        return made

    def _attend(
        self,
        before: IntArray,
        step: Step,
        attend: Attend,
        backend: str,
        module: Any,
        query: Tensor,
        options: dict[str, Any],
    ) -> tuple[Tensor, Any]:
        self.read = self.decision = None
        if unknown := [name for name in _UNKNOWN if options.get(name) is not None]:
            raise UnsupportedError(
                f"{self.cache.policy.name} on {type(module).__name__}",
                [
                    f"its attention takes {' and '.join(unknown)} (learned sinks, soft caps), and chosen "
                    "blocks are attended to without: use a policy that evicts, or full"
                ],
            )
        selector, store = cast(Selector, self.cache.policy), self.stored
        one_each = step.query_len == 1 and not step.padded
        if not (self.sparse and one_each) or selector.reads_all(store.longest):
            return super()._attend(before, step, attend, backend, module, query, options)
        scaling = options.get("scaling")
        lens = step.slots(store.lens, query.device)
        with torch.no_grad():
            self.decision = decision = selector.choose(self._read_view(query, lens, scaling))
            slots, there = entries_of(decision, self.reads.block, lens)
            blocks = -(-store.longest // self.reads.block)
            self.read = count_read(decision, self.reads.block, lens, blocks, store.heads)
        return attend_to(query, store.keys, store.values, slots, there, scaling), None

    def _read_view(self, query: Tensor, lens: Tensor, scaling: float | None) -> ReadView:
        """What the selector gets to see."""
        store, reads = self.stored, self.reads
        blocks = -(-store.longest // reads.block)
        recorded: dict[str, Tensor] = {}
        for index in self.indexes:
            recorded |= index.show(query, lens, blocks)
        queries = query[:, :, 0]
        factor = 1.0 if scaling is None else scaling * math.sqrt(query.shape[-1])
        return ReadView(
            layer=self.index,
            queries=queries if math.isclose(factor, 1.0, rel_tol=1e-6) else queries * factor,
            lens=lens,
            blocks=blocks,
            kv_heads=store.heads,
            reads=reads,
            recorded=recorded,
        )

    def positions_read(self) -> list[list[Tensor]]:
        """Positions that the newest forward read: an int64 tensor per row and query head (or KV head)."""
        if self.decision is None:
            return self.cache.kept_positions(self.index)
        lens = torch.tensor(self.stored.lens, device=self.stored.device)
        slots, there = entries_of(self.decision, self.reads.block, lens)
        group = slots.shape[1] // self.stored.heads
        return [
            [
                self.stored.positions[row, head // group, slots[row, head][there[row, head]]].long().cpu()
                for head in range(slots.shape[1])
            ]
            for row in range(slots.shape[0])
        ]

    def select_rows(self, index: Sequence[int]) -> None:
        """Keep the rows ``index``, in that order, repeats allowed."""
        super().select_rows(index)
        for each in self.indexes:
            each.select_rows(torch.tensor(list(index), device=self.stored.device))

    def forget_newest(self, removed: int, seq_lens: Sequence[int]) -> None:
        """Forget the newest ``removed`` entries; the sequences are now ``seq_lens`` long."""
        super().forget_newest(removed, seq_lens)
        for index in self.indexes:
            index.forget(self.stored.lens)

    @property
    def index_nbytes(self) -> int:
        """Bytes kept per block beside the entries."""
        return sum(index.nbytes for index in self.indexes)
