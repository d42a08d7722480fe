"""What a task is: problems, a prompt, a grader, and a version that changes when any of them does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self

from kvkeep.core.budget import PromptMode
from kvkeep.core.errors import ConfigError
from kvkeep.evaluation.records import AnswerClass, SplitPart
from kvkeep.evaluation.splits import hash_order, part_of


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One question.

    Parameters
    ----------
    id
        Stable name: it decides the split and the random numbers, so never a row number.
    question
        Text that the prompt template is filled with.
    reference
        The right answer, as the grader reads it.
    cluster
        Problems that belong together share one; ``None`` is the problem itself.
    meta
        Further facts, JSON-ready (subject, level, depth of a needle …).
    """

    id: str
    question: str
    reference: str
    cluster: str | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Grade:
    """What the grader says about one text.

    Parameters
    ----------
    answer_class
        ``"correct"``, ``"wrong"``, ``"not_extracted"`` (no answer was found: not a reasoning failure) or
        ``"timed_out"`` (the grader was stopped: nothing is known).
    score
        Between 0 and 1; 1 for a correct answer unless the task gives parts of a point.
    extracted
        The answer that was compared, or ``None``.
    extra
        Further facts, JSON-ready.
    """

    answer_class: AnswerClass
    score: float
    extracted: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, correct: bool, extracted: str | None, **extra: Any) -> Self:
        """Correct or wrong, one point or none."""
        return cls(
            answer_class="correct" if correct else "wrong",
            score=float(correct),
            extracted=extracted,
            extra=extra,
        )

    @classmethod
    def missing(cls, **extra: Any) -> Self:
        """No answer was found in the text."""
        return cls(answer_class="not_extracted", score=0.0, extra=extra)


class Task(ABC):
    """Base of all tasks.

    A task is used as a context manager: leaving it ends the grader's processes.
    """

    name: ClassVar[str]
    version: ClassVar[str]
    template: ClassVar[str]  # name of the default prompt template
    sampling: ClassVar[str] = "vase"  # name of the default sampling preset
    default_model: ClassVar[str] = "demo"
    prompt_mode: ClassVar[PromptMode] = "counts"  # whether prompt entries count towards a budget
    batch_size: ClassVar[int] = 16  # samples that are written together by default
    max_new: int | None = None  # length limit where the preset states none for this task
    grader: ClassVar[str] = "exact"
    metric: ClassVar[Literal["accuracy", "score"]] = "accuracy"  # what results are judged by
    grading_threads: ClassVar[int] = 1
    loop_units: ClassVar[Literal["characters", "tokens"]] = "characters"  # where phrase loops are looked for

    @abstractmethod
    def all_problems(self) -> Sequence[Problem]:
        """Every problem, in the order of the data."""

    def problems(self, part: SplitPart, limit: int | None = None) -> list[Problem]:
        """Problems of one part of the split, in hash order: the first so many are a fair sample."""
        found = {problem.id: problem for problem in self.all_problems() if part_of(problem.id) == part}
        return [found[name] for name in hash_order(found)[:limit]]

    def bind(self, count_tokens: Callable[[str], int]) -> None:  # noqa: B027 (files need no tokenizer)
        """Learn how the model under test counts tokens; generated tasks make their length with it."""

    @abstractmethod
    def grade(self, problem: Problem, text: str) -> Grade:
        """Judge a generated text (prompt not included)."""

    @abstractmethod
    def fingerprint(self) -> str:
        """sha256 (hex) of what decides the problems: the data file, or the generator's settings."""

    def training_text(self, number: int) -> tuple[str, str]:
        """Prompt and right completion of a training problem: any number, and never one of the splits.

        Raises
        ------
        ConfigError
            If the task has no training problems.
        """
        raise ConfigError(
            f"task {self.name} has no training problems (every one is for measuring): train on a file, or on "
            "trace."
        )

    def grader_facts(self) -> dict[str, Any]:
        """Name, version and limits of the grader, for the header of a run."""
        return {"name": self.grader, "version": self.version}

    def close(self) -> None:  # noqa: B027 (most tasks start nothing)
        """End what :meth:`grade` started."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_unique(name: str, problems: Sequence[Problem]) -> None:
    """Refuse a task in which two problems share an id: their draws would be mixed up.

    Raises
    ------
    ConfigError
        Naming the first id that stands twice.
    """
    seen: set[str] = set()
    for problem in problems:
        if problem.id in seen:
            raise ConfigError(f"task {name}: two problems have the id {problem.id!r}; ids must differ.")
        seen.add(problem.id)
