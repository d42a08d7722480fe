"""Loops and failure classes of several runs, and what evictions took before loops began; ready for JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import numpy as np
import torch

from kvkeep.analysis.findings import mean_interval, round_to
from kvkeep.core.errors import ConfigError
from kvkeep.evaluation.comparability import setting_reasons
from kvkeep.evaluation.grading.text_classes import NOVELTY_TOKENS
from kvkeep.evaluation.loops import FEATURES, Lead, evictions, lead, looped, mean_of, start_of
from kvkeep.evaluation.records import FailureClass, Run, SampleRecord
from kvkeep.evaluation.statistics.accuracy import accuracy
from kvkeep.evaluation.statistics.paired import paired_difference
from kvkeep.evaluation.statistics.problem_means import problem_means

#: Evictions before a loop that the figure shows.
SHOWN = 8
_FEWEST = 4  # problems whose resampled mean has an interval worth showing
_POINTS = 40  # of the curve of loops begun


def loops_findings(runs: Mapping[str, Run], *, beside: str | None = None, before: int = 2) -> dict[str, Any]:
    """Hold runs against each other.

    Parameters
    ----------
    runs
        By the name of their arm.
    beside
        The arm that the others are compared with; by default the first.
    before
        Evictions that are "just before" a loop.

    Raises
    ------
    ConfigError
        If there is no run, one is empty, or there is no arm of that name.
    """
    if not runs:
        raise ConfigError("there is no run to look at: name folders that `kvkeep eval --out` wrote.")
    beside = next(iter(runs)) if beside is None else beside
    if beside not in runs:
        raise ConfigError(f"there is no run {beside!r} to hold the others against: choose from {list(runs)}.")
    for name, run in runs.items():
        if not run.samples:
            raise ConfigError(f"run {name!r} has no sample yet.")
    longest = max(sample.tokens for run in runs.values() for sample in run.samples)
    grid = sorted({round(longest * point / _POINTS) for point in range(_POINTS + 1)})
    return {
        "beside": beside,
        "before": before,
        "grid": grid,
        "arms": {
            name: {
                **_arm(run, grid),
                **_against(runs[beside], run, alone=name == beside),
                "evicted": _evicted(run, before),
            }
            for name, run in runs.items()
        },
        "loops": [
            {"arm": name, **found}
            for name, run in runs.items()
            for found in (_loop(sample, before) for sample in run.samples if looped(sample))
        ],
    }


def _arm(run: Run, grid: Sequence[int]) -> dict[str, Any]:
    """Classes and repetition of one run."""
    samples, header = run.samples, run.header
    counts = Counter(sample.failure_class for sample in samples)
    starts = sorted(start for sample in samples if (start := start_of(sample)) is not None)
    return {
        "policy": header.policy,
        "options": json.loads(json.dumps(dict(header.policy_options))),
        "budget": header.budget.get("entries"),
        "task": header.task,
        "model": header.model,
        "texts": len(samples),
        "problems": len({sample.id for sample in samples}),
        "mean_cache": round_to(run.mean_cache),
        "tokens": round_to(float(np.mean([sample.tokens for sample in samples]))),
        "at_limit": sum(sample.extra.get("finish") == "length" for sample in samples),
        "classes": {name: counts[name] for name in get_args(FailureClass)},
        "loops": {"count": sum(map(looped, samples)), **_share(samples)},
        "novelty_min": _mean(samples, [_novelty(sample) for sample in samples]),
        "zlib_tail": _mean(samples, [sample.extra.get("zlib_tail") for sample in samples]),
        "starts": starts,
        "begun": [round_to(sum(start <= token for start in starts) / len(samples)) for token in grid],
    }


def _novelty(sample: SampleRecord) -> float | None:
    return sample.extra.get("novelty_min") if sample.tokens >= NOVELTY_TOKENS else None


def _share(samples: Sequence[SampleRecord]) -> dict[str, Any]:
    """Share of loops; Wilson's interval where Student's is weak, ``None`` for a single problem."""
    means = problem_means(samples, "loop")
    if len(means) < 2:
        return {"share": float(means.means.mean()), "interval": None}
    found = accuracy(means)
    low, high = found.wilson or found.interval
    return {
        "share": round_to(found.estimate),
        "interval": [round_to(max(0.0, low)), round_to(min(1.0, high))],
    }


def _against(baseline: Run, run: Run, *, alone: bool) -> dict[str, Any]:
    """Paired difference in loops; the reasons instead where runs prove nothing about each other."""
    if alone:
        return {"difference": None, "reasons": []}
    reasons = setting_reasons(baseline, run, hint=False)
    ours, theirs = ({sample.key for sample in each.samples} for each in (run, baseline))
    if ours != theirs:
        reasons.append(f"{len(ours ^ theirs)} samples are in one run only")
    if reasons or len(ours) < 2:
        return {"difference": None, "reasons": reasons}
    found = paired_difference(
        problem_means(baseline.samples, "loop"),
        problem_means(run.samples, "loop"),
        rng=np.random.default_rng(0),
        metric="loop",
    )
    facts = {
        "estimate": round_to(found.estimate),
        "interval": [round_to(each) for each in found.interval],
        "p": round_to(found.p),
        "more": found.better,
        "fewer": found.worse,
    }
    return {"difference": facts, "reasons": []}


def _evicted(run: Run, before: int) -> dict[str, Any] | None:
    """What evictions took, before loops and elsewhere; ``None`` for a run that did not note it."""
    if not any("evicted" in sample.extra for sample in run.samples):
        return None
    leads = [(sample, found) for sample in run.samples if (found := lead(sample, before)) is not None]
    rest = [sample for sample in run.samples if not looped(sample)]
    begun = [sample for sample in run.samples if start_of(sample) is not None]
    texts = [sample for sample, _ in leads]

    def of(part: str, feature: str) -> list[float | None]:
        return [mean_of(getattr(found, part), feature) for _, found in leads]

    def change(feature: str) -> list[float | None]:
        pairs = zip(of("before", feature), of("earlier", feature), strict=True)
        return [None if one is None or other is None else one - other for one, other in pairs]

    return {
        "texts": len(leads),
        "without_eviction": len(begun) - len(leads),
        "before": {name: _mean(texts, of("before", name)) for name in FEATURES},
        "earlier": {name: _mean(texts, of("earlier", name)) for name in FEATURES},
        "change": {name: _mean(texts, change(name)) for name in FEATURES},
        "rest": {
            name: _mean(rest, [mean_of(evictions(sample), name) for sample in rest]) for name in FEATURES
        },
        "gap": _mean(texts, [float(found.gap) for _, found in leads]),
        "gap_change": _mean(texts, [found.gap - found.chance for _, found in leads]),
        "gap_by_chance": _mean(texts, [found.chance for _, found in leads]),
        "lines": {name: _line([found for _, found in leads], name) for name in ("range", "large_lost")},
    }


def _line(leads: Sequence[Lead], feature: str) -> list[float | None]:
    """Mean of a feature over texts, from :data:`SHOWN` evictions before the loop to the last one."""
    logs = [[*found.earlier, *found.before][-SHOWN:] for found in leads]
    values = [
        mean_of([log[-back] for log in logs if len(log) >= back], feature) for back in range(SHOWN, 0, -1)
    ]
    return [None if value is None else round_to(value) for value in values]


def _mean(samples: Sequence[SampleRecord], values: Sequence[float | None]) -> dict[str, Any] | None:
    """Mean over problems of the mean of their texts; ``None`` of nothing, no interval over a handful."""
    by_problem: dict[str, list[float]] = {}
    for sample, value in zip(samples, values, strict=True):
        if value is not None:
            by_problem.setdefault(sample.group, []).append(float(value))
    if not by_problem:
        return None
    means = torch.tensor([sum(each) / len(each) for each in by_problem.values()], dtype=torch.float64)
    interval = mean_interval(means) if len(means) >= _FEWEST else None
    return {"value": round_to(float(means.mean())), "interval": interval, "problems": len(means)}


def _loop(sample: SampleRecord, before: int) -> dict[str, Any]:
    """One loop, for the list."""
    found = lead(sample, before)
    return {
        "id": sample.id,
        "draw": sample.draw,
        "tokens": sample.tokens,
        "class": sample.failure_class,
        "period": sample.extra.get("tail_period"),
        "start": start_of(sample),
        "gap": None if found is None else found.gap,
        "before": None if found is None else {name: mean_of(found.before, name) for name in FEATURES},
    }
