"""Classes of generated texts: what went wrong, told apart from what went well."""

from __future__ import annotations

import random

import pytest

from kvkeep.evaluation.grading.text_classes import (
    failure_class,
    loop_onset,
    loop_start,
    novelty_min,
    tail_period,
    text_facts,
)

PROSE = "We add the two numbers and get a sum that is even, so the second case cannot happen at all. "


@pytest.mark.parametrize(
    ("text", "finished", "expected"),
    [
        ("<think>" + PROSE + "</think> \\boxed{4}", True, "ok"),
        (PROSE * 3, True, "ok"),
        ("", True, "ok"),
        (PROSE, False, "truncated"),
        ("<think>" + PROSE, True, "truncated"),
        (PROSE + "Wait, let me check. " * 30, False, "phrase_loop"),
        (PROSE + "so x = 5\n\nand then " * 30, True, "phrase_loop"),
        (PROSE + "!" * 150, True, "garbage"),
        (PROSE + "¶ŧ←" * 40, True, "garbage"),
    ],
)
def test_golden_examples(text: str, finished: bool, expected: str) -> None:
    """Each class of the table in a report must mean what its legend says."""
    assert failure_class(text, finished=finished) == expected


def tokens(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(500) for _ in range(count)]


def test_ordinary_texts_raise_no_alarm() -> None:
    """A detector that alarms on good answers would blame the policy for the task's own repetition."""
    rng = random.Random(0)
    alarms = 0
    for _ in range(300):
        steps = [f"Step {i}: r{rng.randrange(9)} becomes {rng.randrange(10)}." for i in range(60)]
        facts = text_facts(" ".join(steps), " ".join(steps).split(), finished=True)
        alarms += facts.failure_class != "ok" or facts.tail_period is not None
    assert alarms <= 3


def test_a_loop_begins_with_its_first_repeated_token() -> None:
    """Planted at known places: one token off, and the eviction before it would be another."""
    for seed in range(20):
        text, cycle = tokens(seed, 50 + seed), [1000 + place for place in range(1 + seed)]
        looped = text + cycle * 3 + cycle[: seed // 2]
        facts = text_facts("", looped, finished=False)
        assert facts.tail_period == len(cycle)
        assert facts.loop_start == len(text) + len(cycle)
    assert text_facts("", tokens(0, 50), finished=False).loop_start is None
    assert loop_start([7, 7, 7, 7], 1) == 1


def test_loops_of_tokens_are_found_with_their_period() -> None:
    """Loops that are longer than forty characters escape the class; the period still shows them."""
    text = tokens(0, 200)
    cycle = tokens(1, 90)
    assert tail_period(text) is None
    assert tail_period(text + cycle * 3) == 90
    assert tail_period(text + cycle * 2) is None
    assert tail_period([*text, 5, 5, 5]) == 1


def test_novelty_falls_and_the_onset_is_found() -> None:
    """Templated loops repeat with small changes: novelty sees them, and the onset dates them."""
    start = tokens(0, 700)
    cycle = tokens(1, 40)
    assert novelty_min(start * 1) == 1
    assert loop_onset(start) is None
    looping = start + cycle * 40
    assert novelty_min(looping) < 0.05
    onset = loop_onset(looping)
    assert onset is not None
    assert 740 < onset < 780


def test_a_cycle_that_is_cut_off_is_a_loop_for_vocabularies_of_words() -> None:
    """In the built-in reasoner one word is one token: a register loop is longer than forty characters."""
    cycle = [f"w{i}" for i in range(30)]
    words = [f"v{i}" for i in range(100)] + cycle * 4
    assert text_facts(" ".join(words), words, finished=False).failure_class == "truncated"
    assert text_facts(" ".join(words), words, finished=False, cycles=True).failure_class == "phrase_loop"
    assert text_facts(" ".join(words), words, finished=True, cycles=True).failure_class == "ok"
