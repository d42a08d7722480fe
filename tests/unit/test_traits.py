"""When evictions happen."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvkeep.core.errors import ConfigError
from kvkeep.core.traits import Traits, Trigger


def lengths(decode: Any, *, budget: int, buffer: int, start: int, steps: int) -> list[int]:
    """Entries stored after each step of a row that begins with ``start`` tokens."""
    trigger, stored, answer = Trigger(decode=decode), start, []
    for step in range(1, steps + 1):
        stored += 1
        if trigger.due(stored=stored, seen=start + step, budget=budget, buffer=buffer):
            stored = budget
        answer.append(stored)
    return answer


def test_periodic_is_the_rule_of_vase() -> None:
    """With C a multiple of B: evict when more than C are stored and n mod B == 0 (methods 1.2)."""
    trigger = Trigger(decode="periodic")
    for stored in range(400):
        due = trigger.due(stored=stored, seen=0, budget=128, buffer=32)
        assert due is (stored > 128 and stored % 32 == 0)


@pytest.mark.parametrize("decode", ["periodic", "slack", "clock"])
@pytest.mark.parametrize("start", [3, 20, 57])
def test_lengths_stay_between_budget_and_buffer(decode: Any, start: int) -> None:
    """Memory is laid out for budget plus buffer; one entry more would not fit."""
    run = lengths(decode, budget=20, buffer=8, start=start, steps=200)
    settled = run[run.index(20) :] if 20 in run else []
    assert settled
    assert max(settled) <= 28
    assert min(settled) >= 20
    # One eviction per buffer.
    assert settled.count(20) == pytest.approx(len(settled) / 8, abs=1.1)


def test_slack_waits_for_a_full_buffer() -> None:
    """A prompt of C + 3 may stay until C + B are stored; periodic would do the same here."""
    assert lengths("slack", budget=10, buffer=4, start=12, steps=3) == [13, 10, 11]
    assert lengths("slack", budget=10, buffer=4, start=40, steps=2) == [10, 11]


def test_clock_counts_tokens() -> None:
    """R-KV evicts when the number of tokens seen is a multiple of B, whatever is stored."""
    assert lengths("clock", budget=10, buffer=4, start=9, steps=8) == [10, 11, 10, 11, 12, 13, 10, 11]


def test_never() -> None:
    """The full cache."""
    assert lengths("never", budget=10, buffer=4, start=9, steps=50)[-1] == 59


def test_budget_is_never_cut_into() -> None:
    """Nothing is due while the budget is not exceeded."""
    for decode in ("periodic", "slack", "clock"):
        for stored in range(1, 21):
            assert not Trigger(decode=decode).due(stored=stored, seen=stored, budget=20, buffer=4)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"decode": "often"},
            "trigger 'often' is unknown: use one of periodic, slack, clock, surprise, never.",
        ),
        ({"prefill": "before"}, "prefill trigger 'before' is unknown: use one of defer, after, chunk."),
    ],
)
def test_unknown_triggers(options: dict[str, Any], message: str) -> None:
    """A trigger that does not exist must not mean never."""
    with pytest.raises(ConfigError) as error:
        Trigger(**options)
    assert str(error.value) == message


def test_nothing_is_recorded_by_default() -> None:
    """A policy pays only for what it declares."""
    traits = Traits()
    asked = dataclasses.asdict(traits)
    assert asked.pop("scope") == "layer"
    assert asked.pop("exact_budget")
    del asked["trigger"]
    assert not any(asked.values()), asked
