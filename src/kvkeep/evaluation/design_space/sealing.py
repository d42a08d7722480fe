"""One sealed study of all mechanisms: several challengers, one baseline, one correction."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvkeep.core.files import atomic_path
from kvkeep.evaluation.draft import arm_plan, held_out
from kvkeep.evaluation.extras import need
from kvkeep.evaluation.preregistration import Preregistration
from kvkeep.evaluation.records import Run
from kvkeep.evaluation.seal import freeze, load_frozen, lock_path
from kvkeep.evaluation.tasks.base import Task

if TYPE_CHECKING:
    from kvkeep.evaluation.design_space.stages import Settings

BASELINE = "baseline"
#: The plan, in the folder of the study.
PLAN = "study.yaml"
Pairs = Mapping[str, Mapping[str, tuple[Run, Run]]]


def seal(path: Path, settings: Settings, pairs: Pairs, task: Task) -> Preregistration:
    """Write the study and freeze it; one that is frozen already is read and checked.

    Parameters
    ----------
    pairs
        Baseline and challenger on dev problems at matched budgets, by mechanism and model.
    task
        Whose held-out problems confirm.

    Raises
    ------
    EvidenceError
        If the study that is there was changed after it was frozen.
    """
    if not lock_path(path).exists():
        yaml = need("yaml", extra="eval", purpose="a pre-registration")
        with atomic_path(path) as temporary:
            text = yaml.safe_dump(content(settings, pairs, task), sort_keys=False, allow_unicode=True)
            temporary.write_text(text, encoding="utf-8")
        freeze(path)
    return load_frozen(path)


def content(settings: Settings, pairs: Pairs, task: Task) -> dict[str, Any]:
    """What the study says."""
    first = {name: next(iter(by_model.values())) for name, by_model in pairs.items()}
    baseline = next(iter(first.values()))[0].header
    models = {
        model: {"name": pair[0].header.model, "sha256": pair[0].header.model_sha256}
        for by_model in pairs.values()
        for model, pair in by_model.items()
    }
    plan = held_out(task, settings.problems)
    return {
        "format": 1,
        "study": f"design space of {settings.base}",
        "question": f"Which mechanism makes {settings.base} better at an equal mean memory?",
        "hypotheses": [
            {"id": each.name, "text": f"{each.family}: it helps if {each.does}."}
            for each in settings.mechanisms
        ],
        "tasks": [plan],
        "models": list(models.values()),
        "arms": {
            "baseline": arm_plan(baseline),
            "challengers": {name: arm_plan(pair[1].header, study=baseline) for name, pair in first.items()},
        },
        "cells": [
            {
                "task": plan["name"],
                "model": pair[0].header.model,
                "arm": name,
                "baseline": pair[0].header.budget["entries"],
                "challenger": pair[1].header.budget["entries"],
                "prompt_sha256": pair[0].header.prompt_sha256,
            }
            for name, by_model in pairs.items()
            for pair in by_model.values()
        ],
        "sampling": dict(baseline.sampling),
        "draws": settings.draws,
        "seeds": list(baseline.seeds),
        "memory": {"match": "mean_memory", "tolerance": settings.tolerance},
        "analysis": {"metric": baseline.metric, "seed": 0, "correction": "holm"},
        "branches": {
            "A": "claim the mechanisms with a better cell and no worse one",
            "B": "report all of them as inconclusive, with intervals",
            "C": "reject the mechanisms with a worse cell, claim others with a better one",
        },
        "dev_evidence": {
            "rule": "the budget whose mean memory on dev problems (bytes of keys and values, as entries in "
            "16 bits) equals that of the baseline",
            "runs": [
                f"{name} on {model}: mean memory {pair[1].mean_memory:.1f} against {pair[0].mean_memory:.1f}"
                for name, by_model in pairs.items()
                for model, pair in by_model.items()
            ],
        },
    }
