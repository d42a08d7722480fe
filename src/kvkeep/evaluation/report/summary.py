"""One run in a dozen numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, get_args

import numpy as np

from kvkeep.core.precision import widths
from kvkeep.evaluation.records import AnswerClass, FailureClass, Run, SampleRecord
from kvkeep.evaluation.statistics.accuracy import Accuracy, accuracy, majority_at, pass_at
from kvkeep.evaluation.statistics.problem_means import problem_means

# Classes of the table in words: an answer that was not found is no failure of reasoning.
OUTCOMES = ("correct", "wrong", "cut off", "no answer", "answer not extracted", "grader stopped")


def outcome(sample: SampleRecord) -> str:
    """Where a sample belongs in the table of failures, one of :data:`OUTCOMES`."""
    if sample.answer_class in ("correct", "wrong"):
        return sample.answer_class
    if sample.answer_class == "timed_out":
        return "grader stopped"
    if sample.extra.get("present_unextracted"):
        return "answer not extracted"
    return "no answer" if sample.extra.get("finish", "stop") == "stop" else "cut off"


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a table row or a point of a figure needs.

    Parameters
    ----------
    run, label, task, model, policy, budget
        Names; ``label`` is policy and budget in one.
    complete
        Whether every sample of the header is there.
    problems, samples, draws
        Counts; ``draws`` are per problem.
    metric
        What the task is judged by: ``"accuracy"``, or ``"score"`` if it gives parts of a point.
    accuracy
        The metric as avg@k, with its interval; ``None`` with fewer than two problems.
    majority, any_of
        maj@k and pass@k over all draws; ``None`` with fewer than three, for an incomplete run, for programs
        (no two are the same answer), and where a sample gives parts of a point.
    correct, score
        Share of samples that are right in every part; mean credit.
    accuracy_extracted
        Share of correct ones among the samples in which an answer was found.
    mean_cache, mean_cache_per_sample, peak_cache, prefill_cache
        Entries per KV head and layer: over steps, over samples, the largest, at the end of the prompt.
    mean_memory
        Entries of 16 bits that would take the same bytes, over steps; 0 where it was not measured.
    mean_read, peak_read, mean_read_by_query
        Entries per KV head and layer that a step read, each once: mean and maximum; and what one query head
        read, ``None`` if it was not measured.
    evictions
        Rounds of eviction per sample, on average.
    tokens, at_limit
        Mean new tokens; share of samples that ended at the length limit.
    tokens_per_second
        New tokens over the time spent writing.
    kv_bytes
        Most bytes that a batch held for keys and values, ``None`` if it was not measured.
    outcomes, failure_classes, answer_classes
        Counts of samples.
    parts
        Share of correct parts by their name, for tasks that grade by parts.
    """

    run: str
    label: str
    task: str
    model: str
    policy: str
    budget: int | None
    complete: bool
    problems: int
    samples: int
    draws: int
    metric: str
    accuracy: Accuracy | None
    majority: Accuracy | None
    any_of: Accuracy | None
    correct: float
    score: float
    accuracy_extracted: float | None
    mean_cache: float
    mean_cache_per_sample: float
    peak_cache: float
    prefill_cache: float
    mean_memory: float
    mean_read: float
    peak_read: float
    mean_read_by_query: float | None
    evictions: float
    tokens: float
    at_limit: float
    tokens_per_second: float | None
    kv_bytes: int | None
    outcomes: dict[str, int]
    failure_classes: dict[str, int]
    answer_classes: dict[str, int]
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def weighed(self) -> bool:
        """Whether entries are in few bits, so that their number does not say what they take."""
        return self.mean_memory > 0 and abs(self.mean_memory - self.mean_cache) > 0.05

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def summarise(run: Run) -> Summary:
    """Count and average a run, complete or not.

    Raises
    ------
    ConfigError
        If it has no sample yet.
    """
    header, samples = run.header, run.samples
    metric = header.metric
    means = problem_means(samples, metric)
    found = [sample for sample in samples if sample.answer_class in ("correct", "wrong")]
    writing = sum(float(sample.extra.get("write_seconds", sample.seconds)) for sample in samples)
    held = [
        int(sample.extra["batch_peak_kv_bytes"])
        for sample in samples
        if "batch_peak_kv_bytes" in sample.extra
    ]
    budget = header.budget.get("entries")
    complete = len(samples) == header.problems * header.draws
    votes = complete and header.draws > 2 and header.grader != "code" and metric == "accuracy"
    votes = votes and len(set(means.groups)) > 1
    return Summary(
        run=header.run,
        label=label(
            header.policy,
            budget,
            header.budget.get("prompt"),
            header.policy_options.get("token_budget"),
            header.precision,
        ),
        task=header.task,
        model=header.model,
        policy=header.policy,
        budget=budget,
        complete=complete,
        problems=len(means),
        samples=len(samples),
        draws=header.draws,
        metric=metric,
        accuracy=accuracy(means) if len(set(means.groups)) > 1 else None,
        majority=majority_at(samples, header.draws) if votes else None,
        any_of=pass_at(means, header.draws) if votes else None,
        correct=float(problem_means(samples).means.mean()),
        score=float(problem_means(samples, "score").means.mean()),
        accuracy_extracted=_share([sample.correct for sample in found]),
        mean_cache=run.mean_cache,
        mean_cache_per_sample=run.mean_cache_per_sample,
        peak_cache=max(sample.peak_cache for sample in samples),
        prefill_cache=run.prefill_cache,
        mean_memory=run.mean_memory,
        mean_read=run.mean_read,
        peak_read=run.peak_read,
        mean_read_by_query=run.mean_read_by_query,
        evictions=float(np.mean([sample.extra.get("evictions", 0) for sample in samples])),
        tokens=float(np.mean([sample.tokens for sample in samples])),
        at_limit=_share([sample.extra.get("finish") == "length" for sample in samples]) or 0.0,
        tokens_per_second=sum(sample.tokens for sample in samples) / writing if writing > 0 else None,
        kv_bytes=max(held, default=None),
        outcomes=_counts([outcome(sample) for sample in samples], OUTCOMES),
        failure_classes=_counts([sample.failure_class for sample in samples], get_args(FailureClass)),
        answer_classes=_counts([sample.answer_class for sample in samples], get_args(AnswerClass)),
        parts=parts(samples),
    )


def label(
    policy: str,
    budget: int | None,
    prompt: str | None = "counts",
    token_budget: int | None = None,
    precision: Mapping[str, Any] | None = None,
) -> str:
    """Policy, budget and bits in a few words."""
    if token_budget is not None:
        return f"{policy}, {token_budget} read"
    bits = "" if precision is None else f", {widths(precision)}, protect {precision['protect']}"
    if budget is None:
        return policy + bits
    return f"{policy} {budget}" + (" + prompt" if prompt == "kept" else "") + bits


def parts(samples: Sequence[SampleRecord]) -> dict[str, float]:
    """Correct parts over all parts, by name; a task states them as ``{name: [right, all]}``."""
    right: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for sample in samples:
        for name, (good, count) in sample.extra.get("grade", {}).get("parts", {}).items():
            right[name] += good
            total[name] += count
    return {name: right[name] / total[name] for name in sorted(total) if total[name]}


def _counts(values: Sequence[str], names: Sequence[str]) -> dict[str, int]:
    counted = Counter(values)
    return {name: counted[name] for name in names}


def _share(values: Sequence[bool]) -> float | None:
    return sum(values) / len(values) if values else None
