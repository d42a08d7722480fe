"""Timing: who runs when, and the statistics over rounds."""

from __future__ import annotations

import time

import pytest
import torch

from kvkeep.benchmarking.timing import Clock, Spread, alternate


class FakeArm:
    """Sleeps for a given time per step and writes down what is asked of it."""

    def __init__(self, name: str, steps: int, seconds: float, log: list[str], evicts: bool = False) -> None:
        self.name, self.steps, self.seconds, self.log, self.evicts = name, steps, seconds, log, evicts

    def begin(self) -> None:
        self.log.append(f"{self.name} begins")

    def step(self) -> None:
        self.log.append(self.name)
        time.sleep(self.seconds)

    def end(self) -> None:
        self.log.append(f"{self.name} ends")

    def release(self) -> None:
        self.log.append(f"{self.name} releases")


def test_arms_alternate_and_change_direction_each_round() -> None:
    """If one arm ran all its rounds first, a load that comes and goes would look like a speed-up."""
    arms = [FakeArm(name, 1, 0.0, []) for name in "abc"]
    timeline = alternate(arms, rounds=3, clock=Clock(torch.device("cpu")))
    assert timeline.order == ["a", "b", "c", "c", "b", "a", "a", "b", "c"]
    assert {name: len(blocks) for name, blocks in timeline.blocks.items()} == {"a": 3, "b": 3, "c": 3}


def test_only_one_arm_holds_its_cache_at_a_time() -> None:
    """Two caches side by side would spoil the peak memory of both, and may not fit at all."""
    log: list[str] = []
    alternate([FakeArm(name, 2, 0.0, log) for name in "ab"], rounds=2, clock=Clock(torch.device("cpu")))
    held: set[str] = set()
    for entry in log:
        name, _, verb = entry.partition(" ")
        if verb == "begins":
            assert not held
            held.add(name)
        elif verb == "releases":
            held.remove(name)
    assert not held


def test_a_warm_up_round_is_not_counted() -> None:
    """The first step compiles, allocates and faults pages in; an evicting arm's first eviction too."""
    log: list[str] = []
    arms = [FakeArm("stock", 8, 0.0, log), FakeArm("policy", 5, 0.0, log, evicts=True)]
    timeline = alternate(arms, rounds=1, clock=Clock(torch.device("cpu")), warmup_steps=2)
    assert log.count("stock") == 2 + 8
    assert log.count("policy") == 5 + 5
    assert log.count("stock ends") == log.count("policy ends") == 1
    assert timeline.blocks["policy"][0].steps == 5


def test_ratios_are_paired_by_round() -> None:
    """A ratio of medians would mix rounds that saw different loads."""
    arms = [FakeArm("slow", 3, 0.008, []), FakeArm("fast", 6, 0.002, [])]
    timeline = alternate(arms, rounds=3, clock=Clock(torch.device("cpu")))
    slow, fast = timeline.step_seconds("slow"), timeline.step_seconds("fast")
    assert timeline.ratios("slow", "fast") == [a / b for a, b in zip(slow, fast, strict=True)]
    assert min(timeline.ratios("slow", "fast")) > 1
    assert timeline.ratios("slow", "slow") == [1.0] * 3


def test_progress_reaches_its_end() -> None:
    """A bar that stops at 90 % leaves the user waiting for nothing."""
    seen: list[tuple[int, int]] = []
    alternate(
        [FakeArm("a", 3, 0.0, []), FakeArm("b", 2, 0.0, [], evicts=True)],
        rounds=2,
        clock=Clock(torch.device("cpu")),
        progress=lambda done, total, label: seen.append((done, total)),
    )
    assert [done for done, _ in seen] == list(range(1, len(seen) + 1))
    assert seen[-1][0] == seen[-1][1]


def test_spread_is_median_and_quartiles() -> None:
    """A wrong quartile would show a calm machine where there was none."""
    spread = Spread.of([5.0, 1.0, 3.0, 2.0, 4.0])
    assert (spread.low, spread.median, spread.high) == (2.0, 3.0, 4.0)
    single = Spread.of([7.0])
    assert (single.low, single.median, single.high) == (7.0, 7.0, 7.0)


def test_the_clock_measures_the_call() -> None:
    """A clock that returned at once would report any speed."""
    assert Clock(torch.device("cpu")).measure(lambda: time.sleep(0.01)) == pytest.approx(0.01, rel=1.0)
