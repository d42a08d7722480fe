"""Compare two runs, or refuse to, with every reason at once."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kvkeep.core.errors import EvidenceError
from kvkeep.evaluation.comparability import (
    CompareOn,
    cache_reasons,
    check_allowed,
    common_samples,
    held_out_reasons,
    sample_reasons,
    setting_reasons,
)
from kvkeep.evaluation.matching import TOLERANCE, unlike_widths
from kvkeep.evaluation.records import Run, SampleRecord
from kvkeep.evaluation.splits import hash_order
from kvkeep.evaluation.statistics.accuracy import Accuracy, accuracy
from kvkeep.evaluation.statistics.paired import PairedDifference, Test, paired_difference
from kvkeep.evaluation.statistics.power import Spread, power
from kvkeep.evaluation.statistics.problem_means import METRICS, ProblemMeans, problem_means

# Compared beside the main metric: a policy can lose by rambling rather than by reasoning badly.
BESIDE = ("not_extracted", "timed_out", "truncated", "phrase_loop", "garbage", "tokens")
# A gain that is there on the first 50 problems and gone on 200 was none.
GROWTH = (50, 100, 200)
_BESIDE_RESAMPLES = 2000
_CLAIM_PROBLEMS = 200


@dataclass(frozen=True, kw_only=True)
class ArmSummary:
    """One side of a comparison.

    Parameters
    ----------
    run, policy, budget
        Who it is.
    accuracy
        Mean over problems.
    given_extracted
        Share correct among the answers that could be read.
    if_timed_out_correct
        Mean if every answer on which the grader gave up were correct: what that doubt can amount to.
    mean_cache, mean_cache_per_sample, peak_cache, prefill_cache
        Measured entries per KV head and layer: over all steps, over samples, at most, and when the
        prompt had been read.
    mean_read, peak_read
        Entries that a decode step read: less than what is stored only for selectors.
    mean_memory, peak_memory, prefill_memory
        Bytes as entries in 16 bits that would take them: less than the entries only where some are in few
        bits; 0 where that was not measured.
    """

    run: str
    policy: str
    budget: Mapping[str, Any]
    accuracy: Accuracy
    given_extracted: float | None
    if_timed_out_correct: float
    mean_cache: float
    mean_cache_per_sample: float
    peak_cache: float
    prefill_cache: float
    mean_read: float
    peak_read: float
    mean_memory: float
    peak_memory: float
    prefill_memory: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Challenger against baseline on the same problems.

    Parameters
    ----------
    baseline, challenger
        The two sides.
    difference
        Of the main metric.
    beside
        Differences of other metrics, uncorrected: they explain, they do not decide.
    growth
        The difference on the first so many problems in hash order.
    cache_ratio, prefill_ratio, read_ratio, memory_ratio
        Entries of the challenger divided by those of the baseline; the same of the entries read, and of the
        bytes that are stored.
    smallest
        The true difference that such a study finds with 80 % power.
    notes
        What a reader must know before believing any of it.
    """

    baseline: ArmSummary
    challenger: ArmSummary
    difference: PairedDifference
    beside: Mapping[str, PairedDifference]
    growth: Mapping[int, PairedDifference]
    cache_ratio: float
    prefill_ratio: float
    read_ratio: float
    memory_ratio: float
    smallest: float
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def compare(
    baseline: Run,
    challenger: Run,
    *,
    allow: Collection[str] = (),
    on: CompareOn = "mean_cache",
    tolerance: float = TOLERANCE,
    metric: str | None = None,
    test: Test | None = None,
    resamples: int = 10_000,
    seed: int = 0,
    cells: int = 1,
) -> Comparison:
    """Compare two runs at equal memory.

    Parameters
    ----------
    baseline, challenger
        Complete runs on the same problems under the same settings, but for policy and budget.
    allow
        Differences to accept: names of :data:`~kvkeep.evaluation.comparability.ALLOWABLE`. Each is noted
        in the result.
    on, tolerance
        Which measured cache must be equal, and how closely. ``"prefill_cache"`` shows how misleading
        equal memory at the end of the prompt is; ``"mean_memory"`` and ``"prefill_memory"`` are bytes, for
        runs whose entries differ in width, which the other two refuse; ``"mean_read"`` matches what a step
        reads, for selectors, which store everything.
    metric
        ``"accuracy"`` or ``"score"``; what the task is judged by if not given.
    test, resamples, seed, cells
        As in :func:`~kvkeep.evaluation.statistics.paired.paired_difference`.

    Raises
    ------
    EvidenceError
        With every reason why the runs cannot be compared. Runs on confirm problems are always refused
        here: :func:`~kvkeep.evaluation.study.confirm` takes them.
    """
    check_allowed(allow)
    reasons = [
        *held_out_reasons([baseline, challenger]),
        *setting_reasons(baseline, challenger, allow),
        *sample_reasons(baseline, allow),
        *sample_reasons(challenger, allow),
        *cache_reasons(baseline, challenger, on=on, tolerance=tolerance, allow=allow),
    ]
    if not reasons and not common_samples(baseline, challenger)[0]:
        reasons = ["no problem is complete in both runs"]
    if reasons:
        raise EvidenceError(
            f"runs {baseline.header.run!r} and {challenger.header.run!r} cannot be compared", reasons
        )
    notes = [f"differences in {name} were allowed" for name in sorted(allow)]
    if on in ("prefill_cache", "prefill_memory"):
        notes.append("memory was matched at the end of the prompt only: the cache while writing differs")
    if on == "mean_read":
        notes.append("what a step reads was matched, not memory: a selector stores everything")
    if baseline.header.precision != challenger.header.precision:
        bytes_were = ", and bytes were matched" if on.endswith("memory") and "cache" not in allow else ""
        notes.append(unlike_widths(baseline, challenger) + bytes_were)
    return measure(
        baseline,
        challenger,
        metric=metric,
        test=test,
        resamples=resamples,
        seed=seed,
        cells=cells,
        notes=notes,
    )


def measure(
    baseline: Run,
    challenger: Run,
    *,
    metric: str | None = None,
    test: Test | None = None,
    resamples: int = 10_000,
    seed: int = 0,
    cells: int = 1,
    notes: Collection[str] = (),
) -> Comparison:
    """The numbers of a comparison that has been found fair (see :func:`compare`)."""
    metric = metric or baseline.header.metric
    samples = common_samples(baseline, challenger)

    def paired(name: str, count: int, ids: Collection[str] | None = None) -> PairedDifference:
        one, other = (problem_means(side, name) for side in samples)
        if ids is not None:
            one, other = one.only(ids), other.only(ids)
        return paired_difference(
            one,
            other,
            rng=np.random.default_rng(seed),
            metric=name,
            test=test,
            resamples=count,
            cells=cells if name == metric else 1,
        )

    difference = paired(metric, resamples)
    ordered = hash_order({sample.id for sample in samples[0]})
    smallest = _smallest(difference, cells)
    notes = list(notes)
    if difference.n < _CLAIM_PROBLEMS:
        notes.append(
            f"{difference.n} problems: a true difference below {100 * smallest:.1f} pp would be missed more "
            "often than once in five, and a larger measured one overstates itself"
        )
    if samples[0] and len(samples[0]) + len(samples[1]) < len(baseline.samples) + len(challenger.samples):
        notes.append("only problems that are complete in both runs were used")
    return Comparison(
        baseline=_summary(baseline, samples[0], metric),
        challenger=_summary(challenger, samples[1], metric),
        difference=difference,
        beside={name: paired(name, min(resamples, _BESIDE_RESAMPLES)) for name in BESIDE},
        growth={
            count: paired(metric, min(resamples, _BESIDE_RESAMPLES), ordered[:count])
            for count in GROWTH
            if count < difference.n
        },
        cache_ratio=_ratio(challenger.mean_cache, baseline.mean_cache),
        prefill_ratio=_ratio(challenger.prefill_cache, baseline.prefill_cache),
        read_ratio=_ratio(challenger.mean_read, baseline.mean_read),
        memory_ratio=_ratio(challenger.mean_memory, baseline.mean_memory),
        smallest=smallest,
        notes=tuple(notes),
    )


def _smallest(difference: PairedDifference, cells: int) -> float:
    """From the standard error that was measured, whatever it is made of."""
    measured = Spread(draw_variance=0.0, effect_variance=difference.standard_error**2)
    return power(1, 1, 0.0, measured, cells=cells).smallest


def _ratio(one: float, other: float) -> float:
    return one / other if other else float("nan")


def _summary(run: Run, samples: list[SampleRecord], metric: str) -> ArmSummary:
    read = [sample for sample in samples if sample.answer_class in ("correct", "wrong")]
    credit = METRICS[metric]
    hopeful = [1.0 if sample.answer_class == "timed_out" else credit(sample) for sample in samples]
    values: ProblemMeans = problem_means(samples, metric)
    return ArmSummary(
        run=run.header.run,
        policy=run.header.policy,
        budget=dict(run.header.budget),
        accuracy=accuracy(values),
        given_extracted=float(np.mean([sample.correct for sample in read])) if read else None,
        if_timed_out_correct=float(np.mean(hopeful)),
        mean_cache=run.mean_cache,
        mean_cache_per_sample=run.mean_cache_per_sample,
        peak_cache=max(sample.peak_cache for sample in samples),
        prefill_cache=run.prefill_cache,
        mean_read=run.mean_read,
        peak_read=run.peak_read,
        mean_memory=run.mean_memory,
        peak_memory=run.peak_memory,
        prefill_memory=run.prefill_memory,
    )
