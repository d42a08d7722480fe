"""`kvkeep bench stores`: what pages cost, beside one block per layer with as many entries."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedModel

from kvkeep.benchmarking.arms import PolicyArm, Scene, SkewedArm
from kvkeep.benchmarking.memory import PeakMemory
from kvkeep.benchmarking.models import random_prompt
from kvkeep.benchmarking.report import describe_machine, markdown_table
from kvkeep.benchmarking.synthetic import NOTE
from kvkeep.benchmarking.timing import Clock, Progress, Spread, alternate
from kvkeep.calibration.capture import capture
from kvkeep.core.budget import format_bytes
from kvkeep.core.errors import ConfigError
from kvkeep.core.policy import Policy
from kvkeep.policies.full import Full


@dataclass(frozen=True, kw_only=True)
class StoresSettings:
    """What `kvkeep bench stores` measures.

    Parameters
    ----------
    batch, prompt
        Sequences; tokens that are read for real, the rest of the entries is synthetic.
    skew
        One head of each layer holds so many times the mean.
    rounds
        Rounds that count; each arm decodes one eviction period in each.
    seed
        Of prompt, synthetic entries and policy.

    Raises
    ------
    ConfigError
        If a number is out of range.
    """

    batch: int = 8
    prompt: int = 64
    skew: int = 16
    rounds: int = 7
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch", "prompt", "skew", "rounds"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} {getattr(self, name)} is below 1.")


@dataclass(kw_only=True)
class StoreArm:
    """One store's figures.

    Parameters
    ----------
    name
        What ran.
    step_ms
        Milliseconds per step over rounds, evictions included.
    slower
        Step time over that of the dense arm with as many entries, paired within rounds.
    entries
        Mean entries per head while decoding.
    cache_bytes
        Keys and values.
    """

    name: str
    step_ms: Spread
    slower: Spread
    entries: float
    cache_bytes: int


@dataclass(kw_only=True)
class StoresReport:
    """All arms."""

    machine: dict[str, Any]
    settings: StoresSettings
    policy: str
    budget: int
    arms: list[StoreArm]

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"kind": "stores", **asdict(self)}

    def title(self) -> str:
        """One line: policy, model, setting."""
        return (
            f"{self.policy}, budget {self.budget}, {self.machine['model']} ({self.machine['dtype']}), batch "
            f"{self.settings.batch}: dense and paged stores in turns"
        )

    def header(self) -> list[str]:
        """Names of the columns."""
        return ["store", "ms/step", "of dense (quartiles)", "entries per head", "cache"]

    def rows(self) -> list[list[str]]:
        """One line per arm."""
        return [
            [
                arm.name,
                f"{arm.step_ms.median:.1f}",
                f"{arm.slower.median:.3f} ({arm.slower.low:.3f} – {arm.slower.high:.3f})",
                f"{arm.entries:.1f}",
                format_bytes(arm.cache_bytes),
            ]
            for arm in self.arms
        ]

    def tables(self) -> list[tuple[list[str], list[list[str]]]]:
        """Header and rows of the one table."""
        return [(self.header(), self.rows())]

    def footer(self) -> list[str]:
        """How to read it."""
        return [
            f"{self.settings.rounds} rounds, medians; ratios are paired within rounds; arms with a policy "
            "evict once a round, the others not at all",
            f"{self.settings.prompt} tokens were read for real, {NOTE}",
        ]

    def markdown(self) -> str:
        """The table as a file."""
        return markdown_table(self.title(), self.header(), self.rows(), self.footer(), self.machine)


def run_stores(
    model: PreTrainedModel,
    policy: Policy,
    settings: StoresSettings,
    *,
    calibration: Any = None,
    progress: Progress | None = None,
) -> StoresReport:
    """Decode the same numbers of entries from either store, in turns.

    Two arms run the policy, evictions included; three keep as many entries as the policy holds on average
    and evict nothing: dense, paged, and paged with one long head.

    Parameters
    ----------
    progress
        Called with (steps done, steps planned, what runs now).
    """
    prompt = random_prompt(model, settings.batch, settings.prompt, settings.seed)
    gauge, steps = PeakMemory(model.device), policy.buffer
    if calibration is None and policy.traits.calibration:
        calibration = capture(model, prompt[0])
    count = policy.amount.count
    old = Scene(prompt=prompt, context=2 * count, seed=settings.seed, peak=gauge)
    as_many = Scene(prompt=prompt, context=count, seed=settings.seed, peak=gauge)
    dense = PolicyArm(model, old, steps, policy, calibration, store="dense", name=f"dense, {policy.name}")
    paged = PolicyArm(model, old, steps, policy, calibration, store="paged", name=f"paged, {policy.name}")
    still = PolicyArm(model, as_many, steps, Full(), store="dense", name="dense, no eviction")
    pages = PolicyArm(model, as_many, steps, Full(), store="paged", name="paged, no eviction")
    arms = [dense, paged, still, pages, SkewedArm(model, as_many, steps, Full(), settings.skew)]
    timeline = alternate(arms, rounds=settings.rounds, clock=Clock(model.device), progress=progress)
    twins = {dense.name: dense, paged.name: dense}
    return StoresReport(
        machine=describe_machine(model),
        settings=settings,
        policy=policy.name,
        budget=count,
        arms=[
            StoreArm(
                name=arm.name,
                step_ms=Spread.of([1e3 * each for each in timeline.step_seconds(arm.name)]),
                slower=Spread.of(timeline.ratios(arm.name, twins.get(arm.name, still).name)),
                entries=arm.entries_read,
                cache_bytes=arm.cache_bytes,
            )
            for arm in arms
        ],
    )
