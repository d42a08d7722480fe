"""Time arms in alternation, so that load on the machine falls on all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

Progress = Callable[[int, int, str], None]


class Clock:
    """Seconds that a call takes on a device.

    On CUDA two events and a synchronisation; else the wall clock.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def measure(self, call: Callable[[], object]) -> float:
        """Run ``call`` once."""
        if self.device.type != "cuda":
            begin = time.perf_counter()
            call()
            return time.perf_counter() - begin
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


class Arm(Protocol):
    """One way to decode: what :func:`alternate` needs of it."""

    name: str
    steps: int

    def begin(self) -> None:
        """Bring the cache to the stated context."""

    def step(self) -> None:
        """Decode one token per sequence."""

    def end(self) -> None:
        """Read off what a block that counts left behind."""

    def release(self) -> None:
        """Give memory back before the next arm runs."""


@dataclass(kw_only=True)
class Block:
    """One arm's turn in one round.

    Parameters
    ----------
    seconds
        Sum of the step times.
    steps
        Decode steps.
    """

    seconds: float
    steps: int

    @property
    def step_seconds(self) -> float:
        """Mean seconds per step: evictions are spread over the steps between them."""
        return self.seconds / self.steps


@dataclass(kw_only=True)
class Spread:
    """Median and quartiles over rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        ordered = sorted(values)
        if len(ordered) == 1:
            return cls(median=ordered[0], low=ordered[0], high=ordered[0])
        low, median, high = statistics.quantiles(ordered, n=4, method="inclusive")
        return cls(median=median, low=low, high=high)


@dataclass(kw_only=True)
class Timeline:
    """Who ran when.

    Parameters
    ----------
    order
        Names of the arms as they ran, round after round.
    blocks
        Blocks by arm, one per round.
    """

    order: list[str] = field(default_factory=list)
    blocks: dict[str, list[Block]] = field(default_factory=dict)

    def step_seconds(self, name: str) -> list[float]:
        """Seconds per step of each round."""
        return [block.step_seconds for block in self.blocks[name]]

    def ratios(self, slower: str, faster: str) -> list[float]:
        """How many times quicker ``faster`` was, round by round: both halves saw the same load."""
        pairs = zip(self.step_seconds(slower), self.step_seconds(faster), strict=True)
        return [a / b for a, b in pairs]


def alternate(
    arms: Sequence[Arm],
    *,
    rounds: int,
    clock: Clock,
    warmup_steps: int = 2,
    progress: Progress | None = None,
) -> Timeline:
    """Run every arm once per round, forwards and backwards in turn.

    Parameters
    ----------
    arms
        Each has its own number of steps per round.
    rounds
        Rounds that count; an uncounted warm-up round of ``warmup_steps`` comes first (an arm with
        evictions warms up for one whole round, so that its eviction has run once).
    progress
        Called with (steps done, steps planned, what runs now).
    """
    timeline = Timeline(blocks={arm.name: [] for arm in arms})
    # A static cache has room for its own steps only.
    warm = {
        arm.name: arm.steps if getattr(arm, "evicts", False) else min(warmup_steps, arm.steps) for arm in arms
    }
    planned = sum(warm.values()) + rounds * sum(arm.steps for arm in arms)
    done = 0

    def run(arm: Arm, steps: int, label: str) -> Block:
        nonlocal done
        arm.begin()
        seconds = 0.0
        for _ in range(steps):
            seconds += clock.measure(arm.step)
            done += 1
            if progress is not None:
                progress(done, planned, f"{label}: {arm.name}")
        return Block(seconds=seconds, steps=steps)

    for arm in arms:
        run(arm, warm[arm.name], "warm-up")
        arm.release()
    for turn in range(rounds):
        for arm in arms if turn % 2 == 0 else reversed(arms):
            block = run(arm, arm.steps, f"round {turn + 1} of {rounds}")
            arm.end()
            arm.release()
            timeline.order.append(arm.name)
            timeline.blocks[arm.name].append(block)
    return timeline
