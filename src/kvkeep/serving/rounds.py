"""One forward of a batch, cut where evictions fall: each round is one call of the attention kernel.

A decode step is one round. A chunk of a prompt that crosses evictions is several: what is stored before an
eviction attends before it. So the result does not depend on where vLLM cuts its chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvkeep.core.arrays import IntArray
from kvkeep.serving.by_head import Rows
from kvkeep.serving.compaction import Cuts
from kvkeep.serving.schedule import Schedule
from kvkeep.serving.upload import upload


@dataclass(frozen=True)
class Piece:
    """Tokens of one row that attend together.

    Parameters
    ----------
    row
        Row of the batch.
    token
        Place of the first of them in the batch's tokens.
    count
        How many.
    position
        Logical position of the first.
    slot
        Its slot.
    """

    row: int
    token: int
    count: int
    position: int
    slot: int


@dataclass(frozen=True)
class Round:
    """What one call of the kernel needs.

    Parameters
    ----------
    tokens
        int64 ``[n]``: which tokens of the batch; ``None`` for all, in order.
    query_start_loc
        int32 ``[rows + 1]``.
    seq_lens
        int32 ``[rows]``: entries to attend to, the new ones included.
    longest
        The largest of them.
    most_tokens
        The most new tokens of a row.
    block_table
        int32 ``[rows, blocks]``.
    slots
        int64 ``[n]``: where the new entries go.
    cuts
        Evictions to carry out first.
    record
        Tokens of the round whose queries are recorded (``None``: all), and their block and place.
    bounds_cpu, lens_cpu
        ``query_start_loc`` and ``seq_lens`` on the host, so that nobody has to wait for the device.
    rows
        For heads that differ in length, else ``None``.
    evicted
        Entries per KV head that the cuts remove, summed over rows.
    """

    tokens: Tensor | None
    query_start_loc: Tensor
    seq_lens: Tensor
    longest: int
    most_tokens: int
    block_table: Tensor
    slots: Tensor
    cuts: Cuts | None
    record: tuple[Tensor | None, Tensor, Tensor] | None
    bounds_cpu: Tensor
    lens_cpu: Tensor
    rows: Rows | None = None
    evicted: int = 0


class RoundPlanner:
    """Cuts batches into rounds.

    Parameters
    ----------
    schedule
        Of all requests.
    window, per_block
        Queries to record per request, and how many fit one block; 0 for none.
    ragged
        Heads differ in length.
    """

    def __init__(
        self, schedule: Schedule, window: int = 0, per_block: int = 0, *, ragged: bool = False
    ) -> None:
        self.schedule, self.window, self.per_block, self.ragged = schedule, window, per_block, ragged

    def untouched(self, longest: int) -> bool:
        """Whether vLLM's own preparation of a step is right as it is: every slot is a position.

        So it is for requests that have not met an eviction and do not in this step, where blocks serve
        nothing else and heads are equally long. Such a step needs no plan.

        Parameters
        ----------
        longest
            Most tokens of a request after the step.
        """
        schedule = self.schedule
        if self.ragged or schedule.side_blocks or schedule.prompt != "chunk":
            return False
        return longest <= schedule.budget + schedule.buffer

    def plan(self, starts: IntArray, counts: IntArray, block_table: Tensor) -> list[Round]:
        """Plan one forward.

        Parameters
        ----------
        starts, counts
            int64 ``[rows]``: tokens read before, and tokens to read now (0: the row is padding).
        block_table
            int32 ``[rows, blocks]`` as vLLM holds it, 0 behind what a row owns.
        """
        schedule = self.schedule
        # Only where the prompt's length matters is the table read: free on a CPU, a wait for a GPU.
        owned = np.zeros_like(starts)
        if schedule.prompt != "chunk":
            owned = (block_table != 0).sum(1).cpu().numpy()
        kept, first = schedule.of_rows(owned)
        period = (starts - kept) % schedule.buffer
        early = starts < first
        if bool((counts <= np.where(early, first - starts, schedule.buffer - period)).all()):
            cut = ~early & (period == 0) & (counts > 0)
            at = np.where(early, starts, kept + period)
            return [
                self._round(None, np.arange(len(starts)), starts, counts, at, cut, kept, first, block_table)
            ]
        return self._several(starts, counts, kept, first, block_table)

    def _several(
        self, starts: IntArray, counts: IntArray, kept: IntArray, first: IntArray, block_table: Tensor
    ) -> list[Round]:
        schedule = self.schedule
        rounds: list[list[Piece]] = []
        begin = np.concatenate([[0], np.cumsum(counts)[:-1]])
        for row in range(len(starts)):
            facts = {"kept": int(kept[row]), "first": int(first[row])}
            position, end, place = int(starts[row]), int(starts[row] + counts[row]), 0
            while position < end:
                stop = min(end, schedule.next_cut(position, **facts))
                piece = Piece(
                    row=row,
                    token=int(begin[row]) + position - int(starts[row]),
                    count=stop - position,
                    position=position,
                    slot=schedule.slot(position, **facts),
                )
                if place == len(rounds):
                    rounds.append([])
                rounds[place].append(piece)
                position, place = stop, place + 1
        return [self._of_pieces(pieces, kept, first, block_table) for pieces in rounds]

    def _of_pieces(self, pieces: list[Piece], kept: IntArray, first: IntArray, block_table: Tensor) -> Round:
        rows = np.array([piece.row for piece in pieces])
        position = np.array([piece.position for piece in pieces])
        cut = (position >= first[rows]) & ((position - kept[rows]) % self.schedule.buffer == 0)
        return self._round(
            np.concatenate([np.arange(piece.token, piece.token + piece.count) for piece in pieces]),
            rows,
            position,
            np.array([piece.count for piece in pieces]),
            np.array([piece.slot for piece in pieces]),
            cut,
            kept[rows],
            first[rows],
            block_table,
        )

    def _round(
        self,
        tokens: IntArray | None,
        rows: IntArray,
        position: IntArray,
        count: IntArray,
        slot: IntArray,
        cut: IntArray,
        kept: IntArray,
        first: IntArray,
        block_table: Tensor,
    ) -> Round:
        schedule, size = self.schedule, self.schedule.block_size
        device = block_table.device
        lens = (slot + count).astype(np.int32)
        longest = int(lens.max(initial=1))
        row_table = block_table if tokens is None else block_table[upload(rows, device)]
        table = row_table[:, schedule.side_blocks : schedule.side_blocks - (-longest // size)].contiguous()
        bounds, owner, offset, at = _places(count, slot)
        block, place = np.divmod(at, size)
        owners = upload(owner, device)
        slots = table[owners, upload(block, device)].long() * size + upload(place, device)
        own = None
        if self.ragged:
            own = Rows(
                blocks=self._main(row_table, int((kept + schedule.buffer).max())),
                before=upload(slot, device),
                fresh=upload(position < first, device),
                counts=upload(count, device),
                owner=owners,
                offset=upload(offset, device),
            )
        cuts, evicted = None, 0
        if cut.any():
            cuts = self._cuts(np.flatnonzero(cut), position, kept, first, row_table)
            evicted = int((np.where(position == first, position, kept + schedule.buffer) - kept)[cut].sum())
        record = self._record(owner, offset, position, count, row_table) if self.window else None
        return Round(
            tokens=None if tokens is None else upload(tokens, device),
            query_start_loc=upload(bounds, device),
            seq_lens=upload(lens, device),
            longest=longest,
            most_tokens=int(count.max(initial=0)),
            block_table=table,
            slots=slots,
            cuts=cuts,
            record=record,
            bounds_cpu=torch.from_numpy(bounds),
            lens_cpu=torch.from_numpy(lens),
            rows=own,
            evicted=evicted,
        )

    def _main(self, row_table: Tensor, slots: int) -> Tensor:
        """int64 ``[rows, count]``: the blocks that hold so many slots."""
        schedule = self.schedule
        count = -(-(slots + schedule.spare) // schedule.block_size)
        return row_table[:, schedule.side_blocks : schedule.side_blocks + count].long()

    def _cuts(
        self, which: IntArray, position: IntArray, kept: IntArray, first: IntArray, row_table: Tensor
    ) -> Cuts:
        schedule, device = self.schedule, row_table.device
        seen, kept, first = position[which], kept[which], first[which]
        fresh = seen == first
        held = np.where(fresh, seen, kept + schedule.buffer)
        entries = int(held.max())
        index = upload(which, device)
        own = row_table[index].long()
        ring_blocks = ring_places = None
        if self.window:
            newest = upload(seen[:, None] + np.arange(-self.window, 0), device) % self.window
            ring_blocks = own.gather(1, newest // self.per_block)
            ring_places = newest % self.per_block

        return Cuts(
            blocks=self._main(own, entries),
            seen=upload(seen, device),
            held=upload(held, device),
            kept=upload(kept, device),
            first=upload(fresh, device),
            evictions=upload((seen - first) // schedule.buffer, device),
            entries=entries,
            largest=int(kept.max()),
            moves=int((held - kept).max()),
            even=bool((held == held[0]).all() and (kept == kept[0]).all()),
            ring_blocks=ring_blocks,
            ring_places=ring_places,
        )

    def _record(
        self, owner: IntArray, offset: IntArray, position: IntArray, count: IntArray, row_table: Tensor
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """Where queries go: of a piece longer than the window, only the newest stay."""
        newest = offset >= count[owner] - self.window
        place = (position[owner] + offset) % self.window
        tokens = None
        if not newest.all():
            tokens = upload(np.flatnonzero(newest), row_table.device)
            owner, place = owner[newest], place[newest]
        owners = upload(owner, row_table.device)
        places = upload(place, row_table.device)
        return tokens, row_table[owners, places // self.per_block].long(), places % self.per_block


def _places(count: IntArray, slot: IntArray) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Where rows begin, int32 ``[rows + 1]``; each token's row, place in it and slot, ``[tokens]``."""
    rows = np.arange(len(count) + 1)
    if bool((count == 1).all()):  # a decode step, where every operation counts
        return rows.astype(np.int32), rows[:-1], np.zeros_like(slot), slot
    bounds = np.zeros(len(count) + 1, dtype=np.int32)
    np.cumsum(count, out=bounds[1:])
    owner = np.repeat(rows[:-1], count)
    offset = np.arange(len(owner)) - bounds[owner]
    return bounds, owner, offset, slot[owner] + offset
