"""What a run leaves behind: one header that decides the result, and one record per sample.

Runner, comparison and report exchange these two and nothing else. Both are plain numbers and text,
so a line of a run log is ``json.dumps(record.as_dict())``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self, get_args

from kvkeep.core.errors import DataFileError

AnswerClass = Literal["correct", "wrong", "not_extracted", "timed_out"]
FailureClass = Literal["ok", "truncated", "phrase_loop", "garbage"]
SplitPart = Literal["dev", "confirm"]

FORMAT = 1


class _Plain:
    """To and from the dictionaries that stand in a run log."""

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)  # type: ignore[call-overload]

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Self:
        """What :meth:`as_dict` wrote; ``kind`` and other marks of the log are the reader's to remove.

        Raises
        ------
        DataFileError
            Naming the fields that are missing or unknown.
        """
        fields = dataclasses.fields(cls)  # type: ignore[arg-type]
        known = {f.name for f in fields}
        needed = {
            f.name
            for f in fields
            if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        }
        missing, unknown = sorted(needed - set(saved)), sorted(set(saved) - known)
        if missing or unknown:
            raise DataFileError(
                f"this is no {cls.__name__} of log format {FORMAT}: missing {missing or 'nothing'}, "
                f"unknown {unknown or 'nothing'}. It may come from another version of kvkeep."
            )
        return cls(**saved)


@dataclass(frozen=True, kw_only=True)
class SampleRecord(_Plain):
    """One answer of the model to one problem.

    Parameters
    ----------
    id, draw
        The problem, and which of its samples this is (from 0): together the key of the record.
    answer_class
        ``"correct"``, ``"wrong"``, ``"not_extracted"`` (no answer was found in the text) or
        ``"timed_out"`` (the grader gave up).
    correct
        Whether the answer counts; true exactly for ``"correct"``.
    score
        Credit in 0..1; the same as ``correct`` unless a task grades by steps.
    failure_class
        How the text went: ``"ok"``, ``"truncated"``, ``"phrase_loop"`` or ``"garbage"``.
    tokens, prompt_tokens
        Tokens generated, and tokens of the prompt.
    steps
        Decode steps that were measured: the weight of ``mean_cache`` in the mean of a run.
    mean_cache, peak_cache
        Entries per KV head and layer while the steps attended, prompt included: mean and maximum.
    prefill_cache
        Entries when the prompt had been read.
    mean_read, peak_read
        Entries per KV head and layer that the steps read, each once: mean and maximum. ``None`` becomes what
        was stored: only a selector reads less.
    mean_memory, peak_memory, prefill_memory
        As ``mean_cache``, ``peak_cache`` and ``prefill_cache`` in bytes of keys and values, written down as
        the entries in 16 bits that would take them (:attr:`kvkeep.Precision.weight`). ``None`` in logs that
        are older than these numbers: the entries, unless some were in few bits (:attr:`Run.mean_memory`).
    seconds
        Wall time spent on this sample (its share of a batch).
    cluster
        Problems that belong together share a cluster; ``None`` is the problem itself.
    extra
        Anything else worth keeping: text, extracted answer, evictions, loop measures.

    Raises
    ------
    DataFileError
        If the fields contradict each other.
    """

    id: str
    draw: int
    correct: bool
    answer_class: AnswerClass
    score: float
    mean_cache: float
    peak_cache: float
    tokens: int
    seconds: float
    failure_class: FailureClass = "ok"
    steps: int = 0
    prompt_tokens: int = 0
    prefill_cache: float = 0.0
    mean_read: float | None = None
    peak_read: float | None = None
    mean_memory: float | None = None
    peak_memory: float | None = None
    prefill_memory: float | None = None
    cluster: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problems = []
        for read, stored in (("mean_read", self.mean_cache), ("peak_read", self.peak_cache)):
            if getattr(self, read) is None:
                object.__setattr__(self, read, stored)
        if self.answer_class not in get_args(AnswerClass):
            problems.append(f"answer class {self.answer_class!r} is none of {get_args(AnswerClass)}")
        if self.failure_class not in get_args(FailureClass):
            problems.append(f"failure class {self.failure_class!r} is none of {get_args(FailureClass)}")
        if self.correct != (self.answer_class == "correct"):
            problems.append(f"correct={self.correct} contradicts the answer class {self.answer_class!r}")
        if not 0 <= self.score <= 1:
            problems.append(f"score {self.score} is outside 0..1")
        if self.draw < 0:
            problems.append(f"draw {self.draw} is negative")
        if problems:
            raise DataFileError(f"sample {self.id!r}, draw {self.draw}: {'; '.join(problems)}.")

    @property
    def key(self) -> tuple[str, int]:
        """Problem and draw."""
        return self.id, self.draw

    @property
    def group(self) -> str:
        """The cluster that a bootstrap resamples."""
        return self.id if self.cluster is None else self.cluster


@dataclass(frozen=True, kw_only=True)
class RunHeader(_Plain):
    """Everything that decides the result of a run.

    Parameters
    ----------
    run, created
        Name of the run and the time it began, ISO 8601.
    task, task_version, task_sha256
        The task and the hash of its data.
    split, split_rule, ids_sha256, problems
        Which problems, ``"dev"`` or ``"confirm"``; the rule that parted them; hash
        (:func:`kvkeep.evaluation.splits.ids_sha256`) and number of the ids that were asked for.
    prompt_sha256
        Hash of the prompt template.
    sampling
        Preset and numbers: temperature, top-p, length limits.
    draws, seeds
        Samples per problem, and the seeds of the draws.
    grader, grader_version
        Who decided what is correct.
    policy, policy_options
        Registry name and hyper-parameters.
    budget
        The request: ``{"entries": 68, "prompt": "counts", ...}``.
    model, model_sha256
        Name and hash of the weights.
    engine
        Who wrote the texts: ``"transformers"`` or ``"vllm"``.
    versions, hardware
        Software by name; machine in words.
    command
        The command line.
    calibration_sha256
        Hash of the statistics that the policy read (:attr:`kvkeep.calibration.Statistics.sha256`);
        ``None`` if it reads none.
    gates_sha256
        Hash of the gates that the policy read (:attr:`kvkeep.gates.RetentionGates.sha256`), or ``None``.
    precision
        Settings of the :class:`kvkeep.Precision` of the stored entries; ``None``: all in the model's own.
    preregistration
        Content hash of the frozen pre-registration this run belongs to.
    extra
        Anything else worth keeping.
    """

    run: str
    created: str
    task: str
    task_version: str
    task_sha256: str
    split: SplitPart
    ids_sha256: str
    problems: int
    prompt_sha256: str
    sampling: Mapping[str, Any]
    draws: int
    seeds: Iterable[int]
    grader: str
    grader_version: str
    policy: str
    policy_options: Mapping[str, Any]
    budget: Mapping[str, Any]
    model: str
    model_sha256: str
    split_rule: str = "md5-mod5"
    engine: str = "transformers"
    versions: Mapping[str, str] = field(default_factory=dict)
    hardware: Mapping[str, Any] = field(default_factory=dict)
    command: Iterable[str] = ()
    calibration_sha256: str | None = None
    gates_sha256: str | None = None
    precision: Mapping[str, Any] | None = None
    preregistration: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    format: int = FORMAT

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise DataFileError(f"run {self.run!r} has log format {self.format}; this kvkeep reads {FORMAT}.")
        if self.split not in get_args(SplitPart):
            raise DataFileError(f"run {self.run!r}: split {self.split!r} is none of {get_args(SplitPart)}.")
        # JSON gives lists back: equal headers must compare equal after a round trip.
        object.__setattr__(self, "seeds", tuple(self.seeds))
        object.__setattr__(self, "command", tuple(self.command))

    @property
    def metric(self) -> str:
        """What the task is judged by: ``"accuracy"``, or ``"score"`` where it gives parts of a point."""
        return str(self.extra.get("metric", "accuracy"))


@dataclass(frozen=True, kw_only=True)
class Run:
    """A header and its samples."""

    header: RunHeader
    samples: tuple[SampleRecord, ...]

    @property
    def mean_cache(self) -> float:
        """Mean cache of the run, every decode step counting once: what memory and bandwidth see."""
        steps = sum(sample.steps for sample in self.samples)
        return sum(sample.mean_cache * sample.steps for sample in self.samples) / steps if steps else 0.0

    @property
    def mean_memory(self) -> float:
        """Bytes as entries in 16 bits, every step counting once: the mean cache where nothing is in few.

        0 if it was not measured: entries are in few bits, and the log is older than this number.
        """
        # A sample that ends with its first token took no step, and says nothing of what steps hold.
        found = [(self.memory(s.mean_memory, s.mean_cache), s.steps) for s in self.samples if s.steps]
        if not found or not all(held for held, _ in found):
            return 0.0
        return sum(held * count for held, count in found) / sum(count for _, count in found)

    @property
    def prefill_memory(self) -> float:
        """The same when the prompt had been read."""
        found = [self.memory(s.prefill_memory, s.prefill_cache) for s in self.samples]
        return sum(found) / len(found) if found and all(found) else 0.0

    @property
    def peak_memory(self) -> float:
        """The same at its fullest step, of any sample."""
        found = [self.memory(s.peak_memory, s.peak_cache) for s in self.samples]
        return max(found) if found and all(found) else 0.0

    def memory(self, measured: float | None, entries: float) -> float:
        """What was measured, or the entries where all weigh the same; 0 where nobody knows."""
        if measured is not None:
            return measured
        return entries if self.header.precision is None else 0.0

    @property
    def mean_read(self) -> float:
        """Entries read in a decode step, every step counting once."""
        steps = sum(sample.steps for sample in self.samples)
        return sum((s.mean_read or 0.0) * s.steps for s in self.samples) / steps if steps else 0.0

    @property
    def peak_read(self) -> float:
        """The most entries that a step of any sample read."""
        return max((sample.peak_read or 0.0 for sample in self.samples), default=0.0)

    @property
    def mean_read_by_query(self) -> float | None:
        """Entries that one query head reads in a step, every step counting once; ``None`` if not measured."""
        name, steps = "mean_read_by_query", sum(sample.steps for sample in self.samples)
        if not steps or not all(name in sample.extra for sample in self.samples):
            return None
        return float(sum(sample.extra[name] * sample.steps for sample in self.samples)) / steps

    @property
    def mean_cache_per_sample(self) -> float:
        """Mean of the samples' mean caches: every sample counts once, however long."""
        return sum(s.mean_cache for s in self.samples) / len(self.samples) if self.samples else 0.0

    @property
    def prefill_cache(self) -> float:
        """Mean of the entries held when the prompt had been read."""
        return sum(s.prefill_cache for s in self.samples) / len(self.samples) if self.samples else 0.0
