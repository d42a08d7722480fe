"""Running a task: write every sample, grade it, log it; stop at any time and go on later."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvkeep.core.errors import ConfigError
from kvkeep.evaluation.identity import git_revision, hardware, versions
from kvkeep.evaluation.jobs import Completion, Generator, Job
from kvkeep.evaluation.records import Run, RunHeader, SplitPart
from kvkeep.evaluation.runlog import RunLog
from kvkeep.evaluation.session import Progress, Session
from kvkeep.evaluation.splits import ids_sha256
from kvkeep.evaluation.study import admit
from kvkeep.evaluation.tasks.base import Problem, Task

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
        session = Session(task, log, len(work), on_progress)
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
