"""Reasons why two runs prove nothing about each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal

from kvkeep.core.errors import UnknownNameError
from kvkeep.evaluation.matching import ENTRIES, TOLERANCE, unlike_widths
from kvkeep.evaluation.records import Run, SampleRecord
from kvkeep.evaluation.splits import ids_sha256, part_of

#: Which measured quantity two runs must agree in: entries over all steps, entries after the prompt, the bytes
#: of both, or reading.
CompareOn = Literal["mean_cache", "prefill_cache", "mean_memory", "prefill_memory", "mean_read"]

# What must be equal, under the name by which a difference can be allowed.
SETTINGS: Mapping[str, tuple[str, ...]] = {
    "task": ("task", "task_version", "task_sha256"),
    "problems": ("split", "split_rule", "ids_sha256", "problems"),
    "prompt": ("prompt_sha256",),
    "sampling": ("sampling",),
    "draws": ("draws",),
    "seeds": ("seeds",),
    "grader": ("grader", "grader_version"),
    "model": ("model", "model_sha256"),
    "engine": ("engine",),
    "versions": ("versions",),
}
ALLOWABLE = (*SETTINGS, "missing", "cache")


def check_allowed(allow: Collection[str]) -> None:
    """Refuse a name that allows nothing.

    Raises
    ------
    UnknownNameError
        Naming what may be allowed.
    """
    for name in allow:
        if name not in ALLOWABLE:
            raise UnknownNameError("difference to allow", name, ALLOWABLE)


def setting_reasons(
    baseline: Run, challenger: Run, allow: Collection[str] = (), *, hint: bool = True
) -> list[str]:
    """Settings in which the runs differ, one reason each.

    Parameters
    ----------
    hint
        Whether to name the option that accepts a difference: not for commands that have none.
    """
    reasons = []
    for group, names in SETTINGS.items():
        for name in names:
            one, other = getattr(baseline.header, name), getattr(challenger.header, name)
            if one != other and group not in allow:
                accepts = f" (--allow {group} accepts it)" if hint else ""
                reasons.append(f"{name} is {_difference(one, other)}{accepts}")
    return reasons


def _difference(one: Any, other: Any) -> str:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        keys = sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))
        one, other = ({key: each.get(key) for key in keys} for each in (one, other))
    return f"{_short(one)} in the baseline and {_short(other)} in the challenger"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 70 else f"{text[:67]}…"


def sample_reasons(run: Run, allow: Collection[str] = ()) -> list[str]:
    """Samples that stand twice, are missing, or do not belong to the run."""
    header, name = run.header, run.header.run
    times = Counter(sample.key for sample in run.samples)
    ids = {sample.id for sample in run.samples}
    reasons = []
    twice = [key for key, count in times.items() if count > 1]
    if twice:
        reasons.append(f"run {name!r} has {_some(twice)} more than once")
    beyond = [key for key in times if key[1] >= header.draws]
    if beyond:
        reasons.append(f"run {name!r} promises {header.draws} draws and has {_some(beyond)}")
    if "missing" in allow:
        return reasons
    missing = [(id, draw) for id in sorted(ids) for draw in range(header.draws) if (id, draw) not in times]
    if missing:
        reasons.append(f"run {name!r} lacks {_some(missing)}: finish it with --resume")
    if len(ids) != header.problems:
        reasons.append(
            f"run {name!r} has {len(ids)} of its {header.problems} problems: finish it with --resume"
        )
    elif ids_sha256(ids) != header.ids_sha256:
        reasons.append(f"run {name!r} holds other problems than its header names (ids_sha256)")
    return reasons


def _some(keys: list[tuple[str, int]]) -> str:
    shown = ", ".join(f"{id} draw {draw}" for id, draw in sorted(keys)[:3])
    return f"{len(keys)} samples ({shown}{', …' if len(keys) > 3 else ''})"


def cache_reasons(
    baseline: Run,
    challenger: Run,
    *,
    on: CompareOn = "mean_cache",
    tolerance: float = TOLERANCE,
    allow: Collection[str] = (),
) -> list[str]:
    """Whether one run was given more memory than the other."""
    if "cache" in allow:
        return []
    if on in ENTRIES and baseline.header.precision != challenger.header.precision:
        by_bytes = on.replace("cache", "memory")
        return [
            f"{unlike_widths(baseline, challenger)}: compare them with --match-on {by_bytes}, which counts "
            "bytes (--allow cache accepts it)"
        ]
    one, other = getattr(baseline, on), getattr(challenger, on)
    if not (one > 0 and other > 0):
        return [f"{on} was not measured (baseline {one:g}, challenger {other:g})"]
    if abs(other / one - 1) <= tolerance:
        return []
    unit = " (entries of 16 bits)" if on.endswith("memory") else ""
    return [
        f"{on}{unit} is {one:.1f} in the baseline and {other:.1f} in the challenger "
        f"({100 * (other / one - 1):+.1f} %, allowed {100 * tolerance:g} %): find a budget with kvkeep match "
        "(--allow cache accepts it)"
    ]


def held_out_reasons(runs: Iterable[Run]) -> list[str]:
    """Confirm problems may only be looked at under a frozen pre-registration."""
    return [
        f"run {run.header.run!r} is on confirm problems: compare it with --confirm and a frozen "
        "pre-registration"
        for run in runs
        if run.header.split != "dev"
    ]


def dev_reasons(run: Run) -> list[str]:
    """Development problems in a run that is to confirm something."""
    known = sorted({sample.id for sample in run.samples if part_of(sample.id) == "dev"})
    if not known:
        return []
    shown = ", ".join(known[:3]) + (", …" if len(known) > 3 else "")
    return [
        f"run {run.header.run!r} has {len(known)} dev problems ({shown}): what was tuned on cannot confirm"
    ]


def common_samples(baseline: Run, challenger: Run) -> tuple[list[SampleRecord], list[SampleRecord]]:
    """Samples of the problems that both runs have answered as often as they set out to."""
    complete = []
    for run in (baseline, challenger):
        times = Counter(sample.id for sample in run.samples)
        complete.append({id for id, count in times.items() if count >= run.header.draws})
    ids = complete[0] & complete[1]
    return (
        [sample for sample in baseline.samples if sample.id in ids],
        [sample for sample in challenger.samples if sample.id in ids],
    )
