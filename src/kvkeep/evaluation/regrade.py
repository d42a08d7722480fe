"""Grading the texts of a run anew: a better grader must not cost another generation."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace

from kvkeep.core.errors import DataFileError
from kvkeep.evaluation.grading.extract import present_unextracted
from kvkeep.evaluation.records import Run
from kvkeep.evaluation.runlog import RunLog, log_path, read_log
from kvkeep.evaluation.tasks.base import Task


def regrade(task: Task, source: str | os.PathLike[str], out: str | os.PathLike[str]) -> Run:
    """Grade every text of a run with the task's grader, into a new log; the old one stays as it is.

    Parameters
    ----------
    task
        The task of the run, on the same data.
    source, out
        Folders of the old and of the new run.

    Raises
    ------
    DataFileError
        If the data is not that of the run, or a sample kept no text.
    """
    old = read_log(source)
    header = old.run.header
    if task.fingerprint() != header.task_sha256:
        raise DataFileError(
            f"run {header.run!r} is on other data ({header.task_sha256[:12]}…) than task {task.name} here "
            f"({task.fingerprint()[:12]}…): give the same settings and --data."
        )
    problems = {problem.id: problem for problem in task.all_problems()}
    grader = task.grader_facts()
    digest = hashlib.sha256(log_path(source).read_bytes()).hexdigest()
    fresh = replace(
        header,
        task_version=task.version,
        grader=grader["name"],
        grader_version=grader["version"],
        extra={**header.extra, "grader": grader, "metric": task.metric, "regraded_from": digest},
    )
    samples = []
    with task, RunLog(out, fresh) as log:
        for sample in old.run.samples:
            text = sample.extra.get("text")
            if text is None:
                raise DataFileError(f"sample {sample.key} of run {header.run!r} kept no text to grade.")
            problem = problems[sample.id]
            grade = task.grade(problem, text)
            missing = grade.answer_class == "not_extracted"
            finished = sample.extra.get("finish", "stop") == "stop"
            extra = {
                **sample.extra,
                "extracted": grade.extracted,
                "present_unextracted": missing
                and present_unextracted(text, problem.reference, finished=finished),
                "grade": dict(grade.extra),
            }
            samples.append(
                replace(
                    sample,
                    answer_class=grade.answer_class,
                    correct=grade.answer_class == "correct",
                    score=grade.score,
                    extra=extra,
                )
            )
            log.append(samples[-1])
        if old.footer is not None:
            log.finish({"regraded": True})
    return Run(header=fresh, samples=tuple(samples))
