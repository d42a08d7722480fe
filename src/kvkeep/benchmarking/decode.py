"""`kvkeep bench decode`: build the arms, let them alternate, write the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from kvkeep.benchmarking.arms import STOCK, DecodeArm, DynamicArm, PolicyArm, Scene, StaticArm
from kvkeep.benchmarking.bandwidth import measure_bandwidth
from kvkeep.benchmarking.memory import PeakMemory
from kvkeep.benchmarking.models import random_prompt, step_weight_bytes, stock_twin
from kvkeep.benchmarking.report import ArmReport, DecodeReport, describe_machine
from kvkeep.benchmarking.synthetic import NOTE, measure_scales
from kvkeep.benchmarking.timing import Clock, Progress, Timeline, alternate
from kvkeep.calibration.capture import capture
from kvkeep.core.errors import ConfigError, KvkeepError, UnknownNameError
from kvkeep.core.policy import Policy
from kvkeep.engine.spec import model_spec


@dataclass(frozen=True, kw_only=True)
class DecodeSettings:
    """What `kvkeep bench decode` measures.

    Parameters
    ----------
    batch, context, prompt
        Sequences; tokens seen when a block begins; how many of them are read for real.
    steps
        Decode steps per round of a policy; rounded up to whole eviction periods, so that a round
        holds every eviction it pays for.
    full_steps
        Steps per round of the full-cache arms, which have no period.
    rounds
        Rounds that count; a warm-up round comes first.
    stock
        Full-cache baselines beside ``DynamicCache``: any of ``static``, ``static-compiled``.
    seed
        Of prompt, synthetic entries and policies.

    Raises
    ------
    ConfigError
        If a number is out of range.
    """

    batch: int = 8
    context: int = 8192
    prompt: int = 64
    steps: int = 64
    full_steps: int = 8
    rounds: int = 5
    stock: tuple[str, ...] = ("dynamic", "static")
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch", "context", "prompt", "steps", "full_steps", "rounds"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} {getattr(self, name)} is below 1.")
        if self.prompt > self.context:
            raise ConfigError(
                f"a prompt of {self.prompt} tokens does not fit a context of {self.context}: shorten it."
            )
        for name in self.stock:
            if name not in STOCK:
                raise UnknownNameError("stock cache", name, STOCK)


def whole_periods(steps: int, policy: Policy) -> int:
    """Steps rounded up to whole eviction periods of a policy.

    Examples
    --------
    >>> from kvkeep.policies.vase import VaSEDKV
    >>> whole_periods(100, VaSEDKV(budget=512))
    128
    """
    return -(-steps // policy.buffer) * policy.buffer if policy.bounded else steps


def build_arms(
    model: PreTrainedModel,
    policies: Sequence[Policy],
    settings: DecodeSettings,
    *,
    calibration: Any = None,
) -> tuple[list[DecodeArm], dict[str, str]]:
    """The arms of a benchmark, and why some policies have none.

    Returns
    -------
    tuple
        Arms (baselines first), and reasons by policy name for those that cannot run here.
    """
    prompt = random_prompt(model, settings.batch, settings.prompt, settings.seed)
    scene = Scene(prompt=prompt, context=settings.context, seed=settings.seed, peak=PeakMemory(prompt.device))
    twin = stock_twin(model)
    scales = measure_scales(twin, prompt)
    arms: list[DecodeArm] = [DynamicArm(twin, scene, settings.full_steps, scales)]
    for kind in ("static", "static-compiled"):
        if kind in settings.stock:
            compiled = kind == "static-compiled"
            arms.append(StaticArm(twin, scene, settings.full_steps, scales, compiled))
    if calibration is None and any(policy.traits.calibration for policy in policies):
        calibration = capture(model, prompt[0])
    skipped = {}
    for policy in policies:
        if policy.traits.trigger.needs_entropy:
            skipped[policy.name] = "it evicts where the model is unsure, and tokens of a benchmark are given"
            continue
        steps = whole_periods(settings.steps, policy) if policy.bounded else settings.full_steps
        try:
            arms.append(PolicyArm(model, scene, steps, policy, calibration))
        except KvkeepError as error:
            skipped[policy.name] = str(error)
    return arms, skipped


def run_decode(
    model: PreTrainedModel,
    policies: Sequence[Policy],
    settings: DecodeSettings,
    *,
    calibration: Any = None,
    progress: Progress | None = None,
) -> DecodeReport:
    """Measure all arms in alternation.

    Parameters
    ----------
    model
        Decoder; its attention function is set by kvkeep, baselines run on a stock twin that shares
        its weights.
    policies
        With budgets.
    calibration
        Statistics for policies that need them; without, they are captured on the random prompt, which
        is as good for speed.
    progress
        Called with (steps done, steps planned, what runs now).
    """
    arms, skipped = build_arms(model, policies, settings, calibration=calibration)
    bandwidth = measure_bandwidth(model.device)
    timeline = alternate(arms, rounds=settings.rounds, clock=Clock(model.device), progress=progress)
    weights = step_weight_bytes(model)
    reports = [_report(arm, arms, timeline, settings, weights, bandwidth) for arm in arms]
    stock = [report for report in reports if report.kind == "stock"]
    best = min(stock, key=lambda report: report.step_ms.median)
    for report in reports:
        report.compare(
            full=timeline.ratios(arms[0].name, report.name), stock=timeline.ratios(best.name, report.name)
        )
    return DecodeReport(
        machine=describe_machine(model),
        settings=settings,
        arms=reports,
        best_stock=best.name,
        bandwidth=bandwidth,
        weight_bytes=weights,
        order=timeline.order,
        peak_source=arms[0].scene.peak.source,
        skipped=skipped,
        notes=_notes(settings, arms),
    )


def _report(
    arm: DecodeArm,
    arms: Sequence[DecodeArm],
    timeline: Timeline,
    settings: DecodeSettings,
    weights: int,
    bandwidth: Any,
) -> ArmReport:
    entry_bytes = _entry_bytes(arm)
    read = weights + entry_bytes * arm.entries_read * settings.batch
    others = sum(other.held_bytes for other in arms if other is not arm)
    return ArmReport.build(
        name=arm.name,
        kind=arm.kind,
        batch=settings.batch,
        blocks=timeline.blocks[arm.name],
        eviction_seconds=getattr(arm, "eviction_seconds", []),
        evictions=getattr(arm, "evictions", []),
        period=arm.policy.buffer if isinstance(arm, PolicyArm) and arm.steady else None,
        entries_read=arm.entries_read,
        cache_bytes=arm.cache_bytes,
        beside_bytes=arm.beside_bytes,
        peak_bytes=max(arm.peak_bytes) - others,
        floor_ms=1e3 * bandwidth.floor_seconds(read),
    )


def _entry_bytes(arm: DecodeArm) -> int:
    """Bytes of one entry in all managed layers and KV heads of one sequence."""
    return model_spec(arm.model.config).bytes_per_entry(arm.model.dtype.itemsize)


def _notes(settings: DecodeSettings, arms: Sequence[DecodeArm]) -> list[str]:
    notes = []
    if settings.context > settings.prompt:
        notes.append(f"context {settings.context}: {settings.prompt} tokens read for real, {NOTE}")
    longer = {arm.name: arm.steps for arm in arms if arm.evicts and arm.steps != settings.steps}
    if longer:
        notes.append(f"steps rounded up to whole eviction periods: {longer}")
    notes.append(
        "ms/step is the mean over a round's steps, evictions included; medians and quartiles are over "
        "rounds; ratios are paired within rounds"
    )
    peak = arms[0].scene.peak
    notes.append(
        f"peak: {peak.source} while the arm decodes, minus what other arms keep allocated"
        if peak.resettable
        else f"peak: {peak.source} since the process began (this system cannot start it anew)"
    )
    if not torch.cuda.is_available() and model_is_half(arms[0].model):
        notes.append("half-precision products are slow on CPUs without native support: use float32 there")
    return notes


def model_is_half(model: PreTrainedModel) -> bool:
    """Whether weights are 16 bits wide."""
    return model.dtype.itemsize == 2
