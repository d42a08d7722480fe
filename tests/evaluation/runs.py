"""Hand-made run records for the tests of comparison and statistics."""

from __future__ import annotations

from typing import Any

from kvkeep.evaluation.records import Run, RunHeader, SampleRecord
from kvkeep.evaluation.splits import ids_sha256, part_of


def sample(id: str, draw: int, correct: bool, **changes: Any) -> SampleRecord:
    """A sample with unremarkable measurements."""
    facts: dict[str, Any] = {
        "answer_class": "correct" if correct else "wrong",
        "score": float(correct),
        "mean_cache": 100.0,
        "peak_cache": 128.0,
        "prefill_cache": 20.0,
        "tokens": 200,
        "steps": 199,
        "seconds": 0.5,
    }
    return SampleRecord(id=id, draw=draw, correct=correct, **{**facts, **changes})


def header(**changes: Any) -> RunHeader:
    """A header with unremarkable settings."""
    facts: dict[str, Any] = {
        "run": "run",
        "created": "2026-01-01T00:00:00Z",
        "task": "sums",
        "task_version": "1",
        "task_sha256": "t" * 64,
        "split": "dev",
        "ids_sha256": "i" * 64,
        "problems": 2,
        "prompt_sha256": "p" * 64,
        "sampling": {"preset": "vase", "temperature": 0.6},
        "draws": 3,
        "seeds": (11, 12, 13),
        "grader": "exact",
        "grader_version": "1",
        "policy": "random",
        "policy_options": {"buffer": 16},
        "budget": {"entries": 64, "prompt": "counts"},
        "model": "tiny",
        "model_sha256": "m" * 64,
        "versions": {"kvkeep": "0.1"},
    }
    return RunHeader(**{**facts, **changes})


def names(part: str, count: int) -> list[str]:
    """The first so many ids of a made-up task that belong to a part."""
    chosen = (f"q/{number}" for number in range(10 * count))
    return [name for name in chosen if part_of(name) == part][:count]


def run(correct: dict[str, list[bool]], *, mean_cache: float = 100.0, **changes: Any) -> Run:
    """A complete run: what was correct, draw by draw, for each problem."""
    draws = max(len(each) for each in correct.values())
    top: dict[str, Any] = {
        "ids_sha256": ids_sha256(correct),
        "problems": len(correct),
        "draws": draws,
        "seeds": tuple(range(draws)),
    }
    samples = tuple(
        sample(id, draw, right, mean_cache=mean_cache)
        for id, draws in correct.items()
        for draw, right in enumerate(draws)
    )
    return Run(header=header(**{**top, **changes}), samples=samples)
