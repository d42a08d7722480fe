"""`kvkeep bench flat`: does a token cost as much after 32,000 tokens as after 1,000?"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedModel

from kvkeep.benchmarking.arms import PolicyArm, Scene
from kvkeep.benchmarking.memory import PeakMemory
from kvkeep.benchmarking.models import random_prompt
from kvkeep.benchmarking.report import describe_machine, markdown_table
from kvkeep.benchmarking.timing import Clock, Progress, Spread, alternate
from kvkeep.calibration.capture import capture
from kvkeep.core.budget import format_bytes
from kvkeep.core.errors import ConfigError
from kvkeep.core.policy import Policy


@dataclass(frozen=True, kw_only=True)
class FlatSettings:
    """What `kvkeep bench flat` measures.

    Parameters
    ----------
    batch, prompt
        Sequences; tokens read before decoding begins.
    tokens, window
        Tokens to decode in one run; tokens that are averaged.
    rounds
        After the run: rounds in which a cache that has seen one window and the one that has seen all tokens
        decode one eviction period each, in turns. Their ratio does not suffer from load that drifts.
    seed
        Of prompt and policy.

    Raises
    ------
    ConfigError
        If a number is out of range.
    """

    batch: int = 1
    prompt: int = 64
    tokens: int = 32768
    window: int = 1024
    rounds: int = 9
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch", "prompt", "window", "rounds"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} {getattr(self, name)} is below 1.")
        if self.tokens < 2 * self.window:
            raise ConfigError(
                f"{self.tokens} tokens are fewer than two windows of {self.window}: there would be "
                "nothing to compare. Decode more tokens, or use shorter windows."
            )


@dataclass(kw_only=True)
class Window:
    """One window of decoded tokens.

    Parameters
    ----------
    end
        Tokens decoded when it ended.
    ms
        Mean milliseconds per step, evictions included.
    period_ms
        Median over eviction periods of their mean milliseconds per step: what a window costs when a
        few moments of foreign load are left out.
    memory_bytes, cache_bytes
        Memory in use by process or device, and key and value tensors, at the end.
    """

    end: int
    ms: float
    period_ms: float
    memory_bytes: int
    cache_bytes: int


@dataclass(kw_only=True)
class FlatReport:
    """All windows of one run."""

    machine: dict[str, Any]
    settings: FlatSettings
    policy: str
    budget: int
    windows: list[Window]
    early: int
    late_over_early: Spread

    @property
    def steady(self) -> list[Window]:
        """Windows behind the first, in which the cache fills up."""
        return [window for window in self.windows if window.end > max(self.settings.window, self.budget)]

    def deviation(self, field: str = "period_ms") -> float:
        """Largest relative distance of a steady window from the median of the steady windows."""
        values = [getattr(window, field) for window in self.steady]
        if not values:
            return 0.0
        middle = statistics.median(values)
        return max(abs(value / middle - 1) for value in values)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "kind": "flat",
            **asdict(self),
            "deviation": self.deviation(),
            "deviation_of_means": self.deviation("ms"),
        }

    def title(self) -> str:
        """One line: model, policy, setting."""
        return (
            f"{self.policy}, budget {self.budget}, {self.machine['model']} ({self.machine['dtype']}), batch "
            f"{self.settings.batch}, {self.settings.tokens} tokens decoded in one run"
        )

    def header(self) -> list[str]:
        """Names of the columns."""
        return ["tokens", "ms/step (mean)", "ms/step (median period)", "memory in use", "cache"]

    def rows(self) -> list[list[str]]:
        """The table, window by window."""
        return [
            [
                f"{window.end}",
                f"{window.ms:.2f}",
                f"{window.period_ms:.2f}",
                format_bytes(window.memory_bytes),
                format_bytes(window.cache_bytes),
            ]
            for window in self.windows
        ]

    def tables(self) -> list[tuple[list[str], list[list[str]]]]:
        """Header and rows of the one table."""
        return [(self.header(), self.rows())]

    def footer(self) -> list[str]:
        """The verdict."""
        ratio, tokens = self.late_over_early, self.settings.tokens
        return [
            f"a step after {tokens} tokens over a step after {self.early}, decoded in turns: "
            f"{ratio.median:.3f} (quartiles {ratio.low:.3f} – {ratio.high:.3f}, {self.settings.rounds} "
            "rounds)",
            f"largest deviation from the median window, behind the first {self.settings.window} tokens: "
            f"{100 * self.deviation():.1f} % (of plain means: {100 * self.deviation('ms'):.1f} %)",
            "every token was really decoded; nothing is synthetic here",
        ]

    def markdown(self) -> str:
        """The table as a file."""
        return markdown_table(self.title(), self.header(), self.rows(), self.footer(), self.machine)


def run_flat(
    model: PreTrainedModel,
    policy: Policy,
    settings: FlatSettings,
    *,
    calibration: Any = None,
    progress: Progress | None = None,
) -> FlatReport:
    """Decode many tokens under a policy and time every window of them.

    Parameters
    ----------
    progress
        Called with (tokens done, tokens planned, label).
    """
    device = model.device
    prompt = random_prompt(model, settings.batch, settings.prompt, settings.seed)
    gauge, clock = PeakMemory(device), Clock(device)
    scene = Scene(prompt=prompt, context=settings.prompt, seed=settings.seed, peak=gauge)
    if calibration is None and policy.traits.calibration:
        calibration = capture(model, prompt[0])
    early = max(settings.window, policy.amount.count) if policy.bounded else settings.window
    planned = settings.tokens + early
    windows: list[Window] = []
    steps: list[float] = []

    def decode(tokens: int, before: int) -> Resumed:
        """A cache that has decoded so many tokens; times its steps on the way."""
        arm = PolicyArm(model, scene, settings.tokens, policy, calibration)
        arm.begin()
        for done in range(1, tokens + 1):
            steps.append(clock.measure(arm.step))
            if progress is not None:
                progress(before + done, planned, policy.name)
            if before == 0 and done % settings.window == 0:
                arm.end()
                windows.append(_window(done, steps, policy.buffer, gauge.now(), arm.cache_bytes))
                steps.clear()
        return Resumed(f"after {tokens}", arm)

    late = decode(settings.tokens, 0)
    young = decode(early, settings.tokens)
    timeline = alternate([young, late], rounds=settings.rounds, clock=clock)
    return FlatReport(
        machine=describe_machine(model),
        settings=settings,
        policy=policy.name,
        budget=late.arm.cache.policy.amount.count if policy.bounded else settings.tokens,
        windows=windows,
        early=early,
        late_over_early=Spread.of(timeline.ratios(late.name, young.name)),
    )


class Resumed:
    """An arm whose cache goes on from where it stands, one eviction period per block."""

    evicts = True

    def __init__(self, name: str, arm: PolicyArm) -> None:
        self.name, self.arm, self.steps = name, arm, arm.policy.buffer
        self.step = arm.step

    def begin(self) -> None:
        """The cache is as its last block left it."""

    end = release = begin


def _window(end: int, steps: list[float], period: int, memory: int, cache: int) -> Window:
    period = min(period, len(steps))
    means = [
        statistics.fmean(steps[start : start + period]) for start in range(0, len(steps) - period + 1, period)
    ]
    return Window(
        end=end,
        ms=1e3 * statistics.fmean(steps),
        period_ms=1e3 * statistics.median(means),
        memory_bytes=memory,
        cache_bytes=cache,
    )
