"""A made-up study: files and runs that carry it out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

import kvkeep
from kvkeep.evaluation.identity import plain
from kvkeep.evaluation.records import Run
from kvkeep.evaluation.splits import ids_sha256
from tests.evaluation.runs import names, run

IDS = names("confirm", 80)


def plan(**changes: Any) -> dict[str, Any]:
    """The content of a pre-registration with two cells."""
    content: dict[str, Any] = {
        "format": 1,
        "study": "tova-on-sums",
        "question": "Does tova beat random eviction at equal mean cache?",
        "hypotheses": [{"id": "H1", "text": "accuracy(tova) differs from accuracy(random)"}],
        "tasks": [
            {
                "name": "sums",
                "version": "1",
                "sha256": "a" * 64,
                "part": "confirm",
                "ids_sha256": ids_sha256(IDS),
                "problems": 80,
                "grader": "exact",
                "grader_version": "1",
            }
        ],
        "models": [{"name": "tiny", "sha256": "b" * 64}],
        "arms": {
            "baseline": {"policy": "random", "options": {"buffer": 8}},
            "challenger": {"policy": "tova", "options": {"buffer": 8}},
        },
        "cells": [
            {"task": "sums", "model": "tiny", "baseline": size, "challenger": size, "prompt_sha256": "c" * 64}
            for size in (32, 64)
        ],
        "sampling": {"preset": "vase", "temperature": 0.6},
        "draws": 3,
        "seeds": [11, 12, 13],
        "analysis": {"seed": 2026, "correction": "bonferroni", "resamples": 1000},
        "branches": {"A": "claim it", "B": "say that nothing was found", "C": "reject it"},
    }
    return {**content, **changes}


def write(folder: Path, content: dict[str, Any]) -> Path:
    """The file of a study."""
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def study_run(arm: str, budget: int, share: int, sha256: str, **changes: Any) -> Run:
    """A run of one arm in one cell that solves every ``share``-th problem."""
    policy = kvkeep.policy({"baseline": "random", "challenger": "tova"}[arm], budget=budget, buffer=8)
    facts: dict[str, Any] = {
        "run": f"{arm}-{budget}",
        "task_sha256": "a" * 64,
        "split": "confirm",
        "prompt_sha256": "c" * 64,
        "seeds": (11, 12, 13),
        "policy": policy.name,
        "policy_options": plain(policy.options()),
        "budget": {"entries": budget, "prompt": "counts"},
        "model_sha256": "b" * 64,
        "preregistration": sha256,
    }
    solved = {id: [place % share == 0] * 3 for place, id in enumerate(IDS)}
    return run(changes.pop("solved", solved), **{**facts, **changes})
