"""Draft a pre-registration from the development runs that led to it: hashes are copied, not typed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvkeep.core.errors import ConfigError, EvidenceError
from kvkeep.evaluation.comparability import SETTINGS, setting_reasons
from kvkeep.evaluation.records import Run, RunHeader
from kvkeep.evaluation.splits import ids_sha256

if TYPE_CHECKING:
    from kvkeep.evaluation.tasks.base import Task


def draft(
    study: str,
    question: str,
    pairs: Sequence[tuple[Run, Run]],
    held_out: Mapping[str, Mapping[str, Any]],
    *,
    hypothesis: str,
    seed: int = 0,
    correction: str = "holm",
) -> dict[str, Any]:
    """The content of a study that repeats development runs on the held-out problems.

    Parameters
    ----------
    study, question, hypothesis
        In words.
    pairs
        Baseline and challenger for every cell, at budgets that were matched. The policies are the same
        in all of them but for the budget.
    held_out
        What is to confirm the runs of each task, by the task's name: :func:`held_out` of the same task,
        or of another one where the set of the runs is too small to be parted.
    seed, correction
        Of the analysis.

    Returns
    -------
    dict
        To be written as YAML, read through, changed where need be, and frozen.

    Raises
    ------
    EvidenceError
        If a run is not on dev problems, or the runs do not make one study.
    ConfigError
        If there is no pair, or what is to confirm the runs of a task is missing.
    """
    if not pairs:
        raise ConfigError("a study needs at least one pair of runs: baseline and challenger.")
    headers = [run.header for pair in pairs for run in pair]
    reasons = [
        f"run {header.run!r} is on {header.split!r} problems: a study is drafted from dev runs"
        for header in headers
        if header.split != "dev"
    ]
    reasons += [
        f"run {header.run!r} was written by {header.engine}: studies are carried out with transformers"
        for header in headers
        if header.engine != "transformers"
    ]
    # Cells may differ in task and model; the two arms of a cell may not.
    across = [name for name in SETTINGS if name not in ("sampling", "draws", "seeds")]
    for pair in pairs:
        reasons += setting_reasons(*pair)
        if len(calibrations := {run.header.calibration_sha256 for run in pair} - {None}) > 1:
            reasons.append(f"two calibrations of one model are in use: {sorted(map(str, calibrations))}")
        reasons += setting_reasons(pairs[0][0], pair[0], across)
        if pair[0].header.metric != headers[0].metric:
            reasons.append(
                f"task {pair[0].header.task!r} is judged by {pair[0].header.metric}, "
                f"{headers[0].task!r} by {headers[0].metric}: one family has one metric"
            )
    arms = {
        name: [arm_plan(pair[place].header) for pair in pairs]
        for place, name in enumerate(("baseline", "challenger"))
    }
    reasons += [
        f"the {name} is not the same policy in all cells: {found}"
        for name, found in arms.items()
        if any(each != found[0] for each in found)
    ]
    if reasons:
        raise EvidenceError(f"study {study!r} cannot be drafted from these runs", reasons)
    first = headers[0]
    tasks = [header.task for header in _one_each(headers, "task")]
    missing = [task for task in tasks if task not in held_out]
    if missing:
        raise ConfigError(f"nothing was given to confirm the runs on task {missing[0]!r}.")
    return {
        "format": 1,
        "study": study,
        "question": question,
        "hypotheses": [{"id": "H1", "text": hypothesis}],
        "tasks": list({plan["name"]: dict(plan) for plan in (held_out[task] for task in tasks)}.values()),
        "models": [
            {"name": header.model, "sha256": header.model_sha256} for header in _one_each(headers, "model")
        ],
        "arms": {name: found[0] for name, found in arms.items()},
        "cells": [
            {
                "task": held_out[baseline.header.task]["name"],
                "model": baseline.header.model,
                "baseline": baseline.header.budget.get("entries"),
                "challenger": challenger.header.budget.get("entries"),
                "prompt_sha256": baseline.header.prompt_sha256,
                **_calibration(baseline.header, challenger.header),
                **_gates(baseline=baseline.header, challenger=challenger.header),
            }
            for baseline, challenger in pairs
        ],
        "sampling": dict(first.sampling),
        "draws": first.draws,
        "seeds": list(first.seeds),
        **_memory(headers),
        "analysis": {"metric": first.metric, "seed": seed, "correction": correction},
        "dev_evidence": {
            "runs": [
                f"{run.header.run}: mean cache {run.mean_cache:.1f}, created {run.header.created}"
                for pair in pairs
                for run in pair
            ]
        },
    }


def _calibration(*headers: RunHeader) -> dict[str, str]:
    found = [each.calibration_sha256 for each in headers if each.calibration_sha256 is not None]
    return {"calibration_sha256": found[0]} if found else {}


def _gates(**arms: RunHeader) -> dict[str, dict[str, str]]:
    found = {arm: each.gates_sha256 for arm, each in arms.items() if each.gates_sha256 is not None}
    return {"gates_sha256": found} if found else {}


def _memory(headers: Sequence[RunHeader]) -> dict[str, dict[str, str]]:
    """Arms whose entries differ in width are given equal bytes."""
    alike = all(header.precision == headers[0].precision for header in headers)
    return {} if alike else {"memory": {"match": "mean_memory"}}


def _one_each(headers: Sequence[RunHeader], field: str) -> list[RunHeader]:
    return list({getattr(header, field): header for header in headers}.values())


def held_out(task: Task, limit: int | None = None) -> dict[str, Any]:
    """The held-out problems of a task, or a fair sample of so many, as a plan names them.

    Raises
    ------
    ConfigError
        If it has none.
    """
    ids = [problem.id for problem in task.problems("confirm", limit)]
    if not ids:
        raise ConfigError(f"task {task.name} holds no problem out: confirm on another set of its kind.")
    grader = task.grader_facts()
    return {
        "name": task.name,
        "version": task.version,
        "sha256": task.fingerprint(),
        "part": "confirm",
        "ids_sha256": ids_sha256(ids),
        "problems": len(ids),
        "grader": grader["name"],
        "grader_version": grader["version"],
    }


def arm_plan(header: RunHeader, study: RunHeader | None = None) -> dict[str, Any]:
    """The policy of a run as a study names it.

    Parameters
    ----------
    study
        A run that draws as the study does; how this one draws is written down where it differs.
    """
    options = dict(header.policy_options)
    while "base" in options:  # a composition: its name says the parts, its base has the numbers
        options = dict(options["base"])
        options.pop("name")
    options.pop("budget", None)
    plan = {
        "policy": header.policy,
        "options": options,
        "prompt": header.budget.get("prompt", "counts"),
    }
    if study is not None and dict(study.sampling) != dict(header.sampling):
        plan["sampling"] = dict(header.sampling)
    if header.precision is not None:
        plan["precision"] = dict(header.precision)
    return plan
