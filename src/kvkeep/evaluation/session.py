"""One session of a run: completions are graded as they come, and logged in their order."""

from __future__ import annotations

import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from kvkeep.evaluation.grading.extract import present_unextracted
from kvkeep.evaluation.grading.text_classes import text_facts
from kvkeep.evaluation.jobs import Completion
from kvkeep.evaluation.records import SampleRecord
from kvkeep.evaluation.runlog import RunLog
from kvkeep.evaluation.statistics.problem_means import METRICS
from kvkeep.evaluation.tasks.base import Grade, Task


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


class Session:
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
