"""Running a task: write every sample, grade it, log it; stop at any time and go on later."""

from __future__ import annotations

import os
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvkeep.core.errors import ConfigError
from kvkeep.evaluation.grading.extract import present_unextracted
from kvkeep.evaluation.grading.text_classes import text_facts
from kvkeep.evaluation.identity import git_revision, hardware, versions
from kvkeep.evaluation.jobs import Completion, Generator, Job
from kvkeep.evaluation.records import Run, RunHeader, SampleRecord, SplitPart
from kvkeep.evaluation.runlog import RunLog
from kvkeep.evaluation.splits import ids_sha256
from kvkeep.evaluation.statistics.problem_means import METRICS
from kvkeep.evaluation.study import admit
from kvkeep.evaluation.tasks.base import Grade, Problem, Task

if TYPE_CHECKING:
    from kvkeep.evaluation.preregistration import Preregistration


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which samples a run consists of.

    Parameters
    ----------
    part
        ``"dev"``, or ``"confirm"`` for a run of a frozen study.
    limit
        So many problems at most (a fair sample: the first in hash order).
    draws
        Samples per problem.
    seed
        Seed of the first draw; the next draws have the next seeds.
    batch_size
        Samples that are written together; does not change results.
    """

    part: SplitPart = "dev"
    limit: int | None = None
    draws: int = 1
    seed: int = 0
    batch_size: int = 16

    def __post_init__(self) -> None:
        for name in ("limit", "draws", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name.replace('_', ' ')} {value} is below 1.")

    @property
    def seeds(self) -> range:
        """Seeds of the draws."""
        return range(self.seed, self.seed + self.draws)


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run has come.

    Parameters
    ----------
    done, total
        Samples.
    metric, credit
        What the task is judged by, and its sum over the samples done.
    fresh, tokens, seconds
        Samples and tokens of this session, and its time.
    """

    done: int
    total: int
    fresh: int
    metric: str
    credit: float
    tokens: int
    seconds: float


def evaluate(
    task: Task,
    generator: Generator,
    out: str | os.PathLike[str],
    plan: Plan,
    *,
    resume: bool = False,
    command: Sequence[str] = (),
    request: Mapping[str, Any] | None = None,
    study: Preregistration | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    batches: Callable[[Sequence[Sequence[Job]]], Iterator[Completion]] | None = None,
) -> Run:
    """Run a task to its end, or go on with a run that was stopped.

    Parameters
    ----------
    out
        Folder of the run.
    resume
        Go on with the log that is there.
    command, request
        The command line and its settings, for the header: what is needed to do it again.
    study
        The frozen study that the run is a part of; confirm problems are not touched without one.
    on_progress
        Called after every sample.
    batches
        Writes all batches of jobs (on a cluster, say); default: ``generator``, one after another.

    Returns
    -------
    Run
        Header and all samples.

    Raises
    ------
    ConfigError
        If draws would be copies of each other, no problem is left, or the log belongs to another run.
    EvidenceError
        If the run asks for confirm problems without a study, or the study does not contain it.
    """
    if plan.draws > 1 and not generator.random:
        raise ConfigError(
            f"{plan.draws} draws of a greedy run under a policy without chance are copies of each other: use "
            "one draw, or a temperature above 0."
        )
    task.bind(generator.count_tokens)
    problems = task.problems(plan.part, plan.limit)
    if not problems:
        raise ConfigError(
            f"task {task.name} has no problem in part {plan.part!r}: all {len(task.all_problems())} are for "
            f"the other part. Tune on another set of its kind (kvkeep study draft --on {task.name} plans "
            "the confirmation), or make more problems."
        )
    header = make_header(task, generator, plan, problems, name=Path(out).name, command=command)
    if request is not None:
        header = replace(header, extra={**header.extra, "request": dict(request)})
    header = admit(header, study)
    work = [
        Job(problem=problem, draw=draw, seed=seed)
        for problem in problems
        for draw, seed in enumerate(plan.seeds)
    ]
    with task, RunLog(out, header, resume=resume) as log:
        session = _Session(task, log, len(work), on_progress)
        write = batches or (lambda parts: (each for part in parts for each in generator.generate(part)))
        session.take(write(unfinished(work, plan.batch_size, set(log.done))))
        log.finish(session.totals())
        order = [job.key for job in work]
        return Run(header=log.header, samples=tuple(log.done[key] for key in order))


def unfinished(work: Sequence[Job], batch_size: int, done: set[tuple[str, int]]) -> list[Sequence[Job]]:
    """Batches with a sample that is missing, each as it would be in an uninterrupted run.

    A batch is written again as a whole: another composition would round otherwise, and a token whose
    lead is a rounding error could change.
    """
    batches = [work[start : start + batch_size] for start in range(0, len(work), batch_size)]
    return [batch for batch in batches if any(job.key not in done for job in batch)]


def make_header(
    task: Task,
    generator: Generator,
    plan: Plan,
    problems: Sequence[Problem],
    *,
    name: str,
    command: Sequence[str],
) -> RunHeader:
    """Everything that decides the result."""
    facts = generator.facts()
    grader = task.grader_facts()
    extra = {"git": git_revision(), "grader": grader, "metric": task.metric, **facts.pop("extra", {})}
    software = versions() | facts.pop("versions", {})
    return RunHeader(
        run=name,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        task=task.name,
        task_version=task.version,
        task_sha256=task.fingerprint(),
        split=plan.part,
        ids_sha256=ids_sha256([problem.id for problem in problems]),
        problems=len(problems),
        draws=plan.draws,
        seeds=plan.seeds,
        grader=grader["name"],
        grader_version=grader["version"],
        versions=software,
        hardware=hardware(),
        command=command,
        extra=extra,
        **facts,
    )


class _Session:
    """Grades completions as they come, in their order, and logs them.

    Grading runs beside the writing: a GPU does not wait for computer algebra.
    """

    def __init__(
        self, task: Task, log: RunLog, total: int, on_progress: Callable[[Progress], None] | None
    ) -> None:
        self.task, self.log, self.total, self.on_progress = task, log, total, on_progress
        self.begin = time.perf_counter()
        self.tokens = self.fresh = 0
        self.metric = log.header.metric
        self.credit = sum(METRICS[self.metric](sample) for sample in log.done.values())
        self.graded: deque[tuple[Completion, Future[Grade]]] = deque()

    def take(self, completions: Iterator[Completion]) -> None:
        """Take all completions; returns when the last is logged."""
        taken = set(self.log.done)
        threads = self.task.grading_threads
        with ThreadPoolExecutor(threads) as pool:
            try:
                for completion in completions:
                    if completion.job.key in taken:
                        continue  # its batch was written again for another sample
                    taken.add(completion.job.key)
                    grading = pool.submit(self.task.grade, completion.job.problem, completion.text)
                    self.graded.append((completion, grading))
                    while self.graded and (self.graded[0][1].done() or len(self.graded) > 2 * threads):
                        self._log_first()
            finally:  # what was written before an error is not lost
                while self.graded:
                    self._log_first()

    def _log_first(self) -> None:
        completion, grading = self.graded.popleft()
        sample = make_record(self.task, completion, grading.result())
        self.log.append(sample)
        self.tokens += sample.tokens
        self.fresh += 1
        self.credit += METRICS[self.metric](sample)
        if self.on_progress is not None:
            self.on_progress(
                Progress(
                    done=len(self.log.done),
                    total=self.total,
                    fresh=self.fresh,
                    metric=self.metric,
                    credit=self.credit,
                    tokens=self.tokens,
                    seconds=time.perf_counter() - self.begin,
                )
            )

    def totals(self) -> dict[str, Any]:
        """For the footer: of this session alone, which is the whole run unless it was resumed."""
        seconds = time.perf_counter() - self.begin
        return {
            "session_tokens": self.tokens,
            "session_seconds": round(seconds, 3),
            "tokens_per_second": round(self.tokens / seconds, 3),
            "peak_process_bytes": peak_process_bytes(),
            "peak_gpu_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
        }


def peak_process_bytes() -> int:
    """The most memory that this process held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def make_record(task: Task, completion: Completion, grade: Grade) -> SampleRecord:
    """Put text, measurements and grade together."""
    problem = completion.job.problem
    facts = text_facts(
        completion.text,
        completion.tokens,
        finished=completion.ended,
        cycles=task.loop_units == "tokens",
    ).as_dict()
    missing = grade.answer_class == "not_extracted"
    return SampleRecord(
        id=problem.id,
        draw=completion.job.draw,
        correct=grade.answer_class == "correct",
        answer_class=grade.answer_class,
        score=grade.score,
        failure_class=facts.pop("failure_class"),
        tokens=len(completion.tokens) + completion.ended,
        prompt_tokens=completion.prompt_tokens,
        steps=completion.steps,
        mean_cache=completion.mean_cache,
        peak_cache=completion.peak_cache,
        prefill_cache=completion.prefill_cache,
        mean_read=completion.mean_read,
        peak_read=completion.peak_read,
        mean_memory=completion.mean_memory,
        peak_memory=completion.peak_memory,
        prefill_memory=completion.prefill_memory,
        seconds=round(completion.seconds, 6),
        cluster=problem.cluster,
        extra={
            "seed": completion.job.seed,
            "finish": "stop" if completion.ended else "length",
            "text": completion.text,
            "extracted": grade.extracted,
            "present_unextracted": missing
            and present_unextracted(completion.text, problem.reference, finished=completion.ended),
            "evictions": completion.evictions,
            "write_seconds": round(completion.write_seconds, 6),
            **facts,
            **completion.extra,
            "grade": dict(grade.extra),
        },
    )
