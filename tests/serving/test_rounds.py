"""Batches of chunks, decodes and padding cut at evictions: the same as reading every token by itself."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvkeep.core.arrays import IntArray
from kvkeep.serving.rounds import Round, RoundPlanner
from kvkeep.serving.schedule import Schedule
from tests.serving.naive import NaiveRow
from tests.serving.test_schedule import schedules

WIDTH = 40  # blocks of a row of the table, most of them not owned


@dataclass
class Request:
    """A request beside its naive twin, with blocks of its own."""

    row: NaiveRow
    blocks: list[int]
    recorded: dict[tuple[int, int], int] = field(default_factory=dict)  # block and place: position

    @property
    def table(self) -> list[int]:
        return self.blocks + [0] * (WIDTH - len(self.blocks))


@st.composite
def batches(draw: st.DrawFn) -> tuple[Schedule, int, int, list[Request], list[list[int]]]:
    """A schedule, what is recorded, some requests, and how many tokens each reads in each step."""
    window = draw(st.sampled_from([0, 1, 5]))
    per_block = draw(st.integers(1, 4)) if window else 0
    schedule = draw(schedules(side=False))
    schedule = Schedule(**{**vars(schedule), "side_blocks": -(-window // per_block) if window else 0})
    prompts = draw(st.lists(st.integers(0, 60), min_size=1, max_size=4))
    free = iter(draw(st.permutations(range(1, 4 * WIDTH + 1))))
    requests = []
    for prompt in prompts:
        blocks = [next(free) for _ in range(min(schedule.blocks(prompt), WIDTH))]
        requests.append(Request(NaiveRow(schedule, prompt), blocks))
    counts = st.one_of(st.just(0), st.just(1), st.integers(1, 70))
    step = st.lists(counts, min_size=len(prompts), max_size=len(prompts))
    return schedule, window, per_block, requests, draw(st.lists(step, min_size=1, max_size=8))


@given(batches())
@settings(deadline=None)
def test_rounds_equal_token_by_token(
    batch: tuple[Schedule, int, int, list[Request], list[list[int]]],
) -> None:
    """What a request keeps would depend on its neighbours, or on where vLLM cuts its prompt."""
    schedule, window, per_block, requests, steps = batch
    if any(schedule.blocks(each.row.prompt_len) > WIDTH for each in requests):
        return
    planner = RoundPlanner(schedule, window, per_block)
    table = torch.tensor([each.table for each in requests], dtype=torch.int32)
    for counts in steps:
        starts = np.array([each.row.seen for each in requests])
        owner = np.repeat(np.arange(len(requests)), counts)
        rounds = planner.plan(starts, np.array(counts), table)
        if planner.untouched(int((starts + counts).max())):
            _check_untouched(rounds, starts, np.array(counts), table, schedule.block_size)
        tokens = [one.tokens.tolist() if one.tokens is not None else [*range(len(owner))] for one in rounds]
        assert sorted(itertools.chain(*tokens)) == list(range(sum(counts)))
        for one, mine in zip(rounds, tokens, strict=True):
            _check(one, [requests[owner[token]] for token in mine], schedule, requests, window)


def _check_untouched(
    rounds: list[Round], starts: IntArray, counts: IntArray, table: Tensor, size: int
) -> None:
    """A step that is left to vLLM: the plan would have been what vLLM prepares from positions alone."""
    (one,) = rounds
    assert one.tokens is None
    assert one.cuts is None
    assert one.record is None
    assert one.rows is None
    some = counts > 0  # who reads nothing attends to nothing
    assert one.lens_cpu.numpy()[some].tolist() == (starts + counts)[some].tolist()
    assert one.bounds_cpu.tolist() == [0, *np.cumsum(counts)]
    slots = [
        int(table[row, position // size]) * size + position % size
        for row, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True))
        for position in range(start, start + count)
    ]
    assert one.slots.tolist() == slots


def test_who_is_left_to_vllm() -> None:
    """Too few: speed; too many: tokens written over entries that belong to others."""
    schedule = Schedule(budget=8, buffer=4, block_size=4)
    planner = RoundPlanner(schedule)
    assert [planner.untouched(longest) for longest in (1, 12, 13)] == [True, True, False]
    side = Schedule(budget=8, buffer=4, block_size=4, side_blocks=1)
    kept = Schedule(budget=8, buffer=4, block_size=4, prompt="kept")
    assert not RoundPlanner(side, 1, 1).untouched(1)
    assert not RoundPlanner(kept).untouched(1)
    assert not RoundPlanner(schedule, ragged=True).untouched(1)


def _check(
    one: Round, owners: list[Request], schedule: Schedule, requests: list[Request], window: int
) -> None:
    """Go through a round token by token, and hold every number against the naive rows."""
    bounds, lens = one.query_start_loc.tolist(), one.seq_lens.tolist()
    cuts = one.cuts
    cut_rows = {} if cuts is None else {tuple(row): place for place, row in enumerate(cuts.blocks.tolist())}
    assert one.longest == max([1, *lens])
    slots, place, evicted = one.slots.tolist(), 0, 0
    positions = []
    for piece, (begin, end) in enumerate(itertools.pairwise(bounds)):
        for token in range(begin, end):
            request = owners[token]
            before, had, rounds_before = request.row.seen, len(request.row.entries), request.row.evictions
            evicts, slot = request.row.read()
            positions.append(before)
            if evicts:
                assert token == begin, "an eviction in the middle of a piece"
                assert cuts is not None
                own = request.blocks[schedule.side_blocks :]
                (found,) = (at for row, at in cut_rows.items() if list(row) == _padded(own, len(row)))
                limit = request.row.limit
                assert (cuts.seen[found], cuts.held[found], cuts.kept[found]) == (before, had, limit)
                assert bool(cuts.first[found]) == (rounds_before == 0)
                assert int(cuts.evictions[found]) == rounds_before
                evicted += 1
                if window:
                    assert _ring(one, found, request, before, window)
            block = request.blocks[schedule.side_blocks + slot // schedule.block_size]
            assert slots[place] == block * schedule.block_size + slot % schedule.block_size
            # The kernel is causal inside a piece: its last token sees all of the entries.
            assert lens[piece] - (end - 1 - token) == len(request.row.entries)
            assert one.block_table[piece].tolist() == _padded(
                request.blocks[schedule.side_blocks :], one.block_table.shape[1]
            )
            place += 1
    assert evicted == (0 if cuts is None else len(cuts.seen))
    if cuts is not None:
        _check_shared(cuts)
    if window:
        assert one.record is not None
        kept, blocks, places = one.record
        indices = range(place) if kept is None else kept.tolist()
        for token, block, at in zip(indices, blocks.tolist(), places.tolist(), strict=True):
            assert block in owners[token].blocks[: schedule.side_blocks]
            owners[token].recorded[block, at] = positions[token]


def _check_shared(cuts: object) -> None:
    """The numbers that the host knows."""
    held, kept = cuts.held, cuts.kept  # type: ignore[attr-defined]
    assert (cuts.entries, cuts.largest) == (held.max(), kept.max())  # type: ignore[attr-defined]
    assert cuts.moves == (held - kept).max()  # type: ignore[attr-defined]
    assert cuts.even == (len(set(held.tolist())) == 1 and len(set(kept.tolist())) == 1)  # type: ignore[attr-defined]


def _ring(one: Round, row: int, request: Request, seen: int, window: int) -> bool:
    """Whether the newest queries are found where they were recorded."""
    assert one.cuts is not None
    blocks, places = one.cuts.ring_blocks, one.cuts.ring_places
    assert blocks is not None
    assert places is not None
    where = zip(blocks[row].tolist(), places[row].tolist(), strict=True)
    wanted = range(seen - window, seen)
    return all(
        request.recorded[at] == position for at, position in zip(where, wanted, strict=True) if position >= 0
    )


def _padded(blocks: list[int], width: int) -> list[int]:
    return (blocks + [0] * width)[:width]
