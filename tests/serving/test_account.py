"""What a request held, against a count token by token and against the worker's ledger."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.core.errors import ConfigError
from kvkeep.serving.account import Account
from kvkeep.serving.ledger import Ledger
from kvkeep.serving.rounds import RoundPlanner
from kvkeep.serving.schedule import PromptHandling, Schedule


def walk(schedule: Schedule, prompt: int, generated: int) -> Account:
    """The same, one token after another."""
    kept, first = schedule.kept(prompt), schedule.first(prompt)
    held = evictions = evicted = 0
    after = []
    for position in range(prompt + generated - 1):
        if schedule.cuts(position, kept=kept, first=first):
            evictions, evicted, held = evictions + 1, evicted + held - kept, kept
        held += 1
        after.append(held)
    steps = after[prompt:]
    prefill = schedule.held(prompt, kept=kept, first=first)
    return Account(
        steps=len(steps),
        entries=sum(steps),
        peak=max(steps, default=prefill),
        prefill=prefill,
        highest=max(after),
        evictions=evictions,
        evicted=evicted,
    )


def schedules() -> st.SearchStrategy[Schedule]:
    def make(prompt: PromptHandling, budget: int, buffer: int, block: int) -> Schedule:
        block = min(block, buffer) if prompt == "defer" else block
        return Schedule(budget=budget, buffer=buffer, block_size=block, prompt=prompt)

    return st.builds(
        make,
        st.sampled_from(("chunk", "defer", "kept")),
        st.integers(1, 60),
        st.integers(1, 20),
        st.integers(1, 16),
    )


@given(schedules(), st.integers(1, 150), st.integers(1, 150))
def test_an_account_is_what_a_walk_finds(schedule: Schedule, prompt: int, generated: int) -> None:
    """A wrong closed form would report memory that nobody used."""
    assert Account.of(schedule, prompt=prompt, generated=generated) == walk(schedule, prompt, generated)


def test_the_full_cache_holds_every_token() -> None:
    """The baseline of every table."""
    account = Account.of(None, prompt=10, generated=4)
    assert (account.steps, account.entries, account.prefill, account.peak) == (3, 11 + 12 + 13, 10, 13)
    assert account.mean == 12
    assert Account.of(None, prompt=10, generated=1).mean == 10
    with pytest.raises(ConfigError, match="at least 1"):
        Account.of(None, prompt=10, generated=0)


@settings(max_examples=40, deadline=None)
@given(
    schedules(),
    st.lists(st.tuples(st.integers(1, 70), st.integers(1, 60)), min_size=1, max_size=5),
    st.lists(st.integers(1, 25), min_size=1, max_size=8),
)
def test_a_ledger_adds_up_the_accounts_however_the_work_is_cut(
    schedule: Schedule, requests: list[tuple[int, int]], chunks: list[int]
) -> None:
    """Steps in mixed batches, and last pieces of a prompt that are one token, must not be lost or doubled."""
    ledger, planner = Ledger(), RoundPlanner(schedule)
    ledger.open(schedule, 1)
    owned = [schedule.blocks(prompt) for prompt, _ in requests]
    table = torch.zeros(len(requests), max(owned), dtype=torch.int32)
    for row, count in enumerate(owned):
        table[row, :count] = torch.arange(1, count + 1)
    prompts = np.array([prompt for prompt, _ in requests])
    lengths = np.array([prompt + generated - 1 for prompt, generated in requests])
    read = np.zeros_like(lengths)
    for turn in range(10_000):
        reading = read < prompts
        left = np.where(reading, prompts, lengths) - read
        wanted = [chunks[(turn + row) % len(chunks)] for row in range(len(requests))]
        counts = np.minimum(left, np.where(reading, wanted, 1))
        if not counts.any():
            break
        ledger.note(read + counts, counts, planner.plan(read, counts, table), reading)
        read = read + counts
    accounts = [Account.of(schedule, prompt=prompt, generated=generated) for prompt, generated in requests]
    found = ledger.read()
    for name in ("steps", "entries", "evictions", "evicted"):
        assert found[name] == sum(getattr(account, name) for account in accounts), name
    assert found["peak_entries"] == max(account.highest for account in accounts)
