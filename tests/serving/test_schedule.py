"""Slots, evictions and blocks against a list that grows and shrinks token by token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.core.errors import ConfigError
from kvkeep.serving.schedule import Schedule
from tests.serving.naive import NaiveRow

MODES = ("chunk", "defer", "kept")


@st.composite
def schedules(draw: st.DrawFn, side: bool = True) -> Schedule:
    """Any schedule that can be built."""
    prompt = draw(st.sampled_from(MODES))
    buffer = draw(st.integers(1, 12))
    return Schedule(
        budget=draw(st.integers(1, 30)),
        buffer=buffer,
        block_size=draw(st.integers(1, buffer if prompt == "defer" else 10)),
        prompt=prompt,
        side_blocks=draw(st.integers(0, 3)) if side else 0,
    )


@given(schedules(), st.integers(0, 90))
def test_slots_and_evictions_are_those_of_a_growing_list(schedule: Schedule, prompt_len: int) -> None:
    """Entries would be written over others, or attended to before they exist."""
    row = NaiveRow(schedule, prompt_len)
    facts = {"kept": schedule.kept(prompt_len), "first": schedule.first(prompt_len)}
    cuts = []
    for position in range(prompt_len + 50):
        evicts, slot = row.read()
        assert schedule.cuts(position, **facts) == evicts
        assert schedule.slot(position, **facts) == slot
        assert schedule.held(position + 1, **facts) == row.held
        if evicts:
            cuts.append(position)
    for position in range(cuts[-1]):
        assert schedule.next_cut(position, **facts) == next(cut for cut in cuts if cut > position)


@given(schedules(), st.integers(0, 90))
def test_blocks_hold_every_slot_and_no_block_is_idle(schedule: Schedule, prompt_len: int) -> None:
    """A request would write into the block of another, or pay for one that it never touches."""
    row = NaiveRow(schedule, prompt_len)
    slots = [row.read()[1] for _ in range(prompt_len + 90)]
    cut = schedule.first(prompt_len)
    before, after = (
        schedule.blocks(prompt_len) - schedule.side_blocks,
        schedule.blocks_after(prompt_len) - schedule.side_blocks,
    )
    size = schedule.block_size
    assert max(slots) // size == before - 1
    assert max(slots[cut:]) // size == after - 1
    assert after <= before


@given(schedules())
def test_a_row_of_blocks_tells_the_prompt(schedule: Schedule) -> None:
    """The worker would evict at other tokens than the scheduler counted on."""
    prompts = range(120)
    owned = np.array([schedule.blocks(prompt) for prompt in prompts])
    kept, first = schedule.of_rows(owned)
    assert kept.tolist() == [schedule.kept(prompt) for prompt in prompts]
    assert first.tolist() == [schedule.first(prompt) for prompt in prompts]


@given(schedules(), st.integers(1, 200), st.integers(1, 200))
def test_blocks_of_a_growing_request(schedule: Schedule, tokens: int, max_len: int) -> None:
    """Without a reservation a long request would own more than its bound, or less than it writes."""
    if schedule.prompt != "chunk":
        return
    bounded = Schedule(**{**vars(schedule), "max_len": max_len})
    tokens = min(tokens, max_len)
    row = NaiveRow(schedule, 0)
    needed = max(row.read()[1] for _ in range(tokens)) // schedule.block_size + 1
    assert bounded.blocks_for(tokens) == schedule.side_blocks + needed
    assert bounded.blocks(5) == bounded.blocks_for(max_len)


def test_blocks_larger_than_the_buffer_cannot_tell_a_deferred_prompt() -> None:
    """Two prompts with different evictions would own equally many blocks."""
    with pytest.raises(ConfigError, match=r"--block-size of at most 16.*prefill='chunk'"):
        Schedule(budget=96, buffer=16, block_size=32, prompt="defer")
    Schedule(budget=96, buffer=16, block_size=32, prompt="chunk")
    Schedule(budget=96, buffer=16, block_size=32, prompt="kept")
