"""Families of comparisons: an exploration against one baseline, or the confirmation of a frozen study."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvkeep.core.budget import Budget
from kvkeep.core.errors import ConfigError, EvidenceError
from kvkeep.evaluation.comparability import cache_reasons, dev_reasons, sample_reasons, setting_reasons
from kvkeep.evaluation.comparison import Comparison, compare, measure
from kvkeep.evaluation.identity import plain
from kvkeep.evaluation.records import Run, RunHeader
from kvkeep.evaluation.statistics.correction import Correction
from kvkeep.evaluation.statistics.decision import Decision, decide
from kvkeep.policies.compose import policy

if TYPE_CHECKING:
    from kvkeep.evaluation.preregistration import ArmName, Cell, Preregistration

_ARMS: tuple[ArmName, ArmName] = ("baseline", "challenger")


@dataclass(frozen=True, kw_only=True)
class Family:
    """Several comparisons and what they amount to together.

    Parameters
    ----------
    comparisons
        By cell.
    decision
        Corrected for their number.
    preregistration
        Hash of the frozen study; ``None`` for an exploration, which confirms nothing.
    deviations
        What was done otherwise than registered.
    """

    comparisons: Mapping[str, Comparison]
    decision: Decision
    preregistration: str | None = None
    deviations: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def explore(
    baseline: Run,
    challengers: Sequence[Run],
    *,
    correction: Correction = "holm",
    alpha: float = 0.05,
    **settings: Any,
) -> Family:
    """Compare runs with one baseline, corrected for their number.

    Parameters
    ----------
    settings
        Those of :func:`~kvkeep.evaluation.comparison.compare`.

    Raises
    ------
    EvidenceError
        If a run cannot be compared.
    ConfigError
        If there is no challenger, or two of them have one name.
    """
    names = [run.header.run for run in challengers]
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"runs {names} to compare: give at least one, each with its own name.")
    comparisons = {
        run.header.run: compare(baseline, run, cells=len(challengers), **settings) for run in challengers
    }
    decision = decide(
        {name: each.difference for name, each in comparisons.items()}, correction=correction, alpha=alpha
    )
    return Family(comparisons=comparisons, decision=decision)


def confirm(study: Preregistration, runs: Collection[Run]) -> Family:
    """Test a frozen study on the held-out problems.

    Parameters
    ----------
    study
        From :func:`~kvkeep.evaluation.seal.load_frozen`, which checks the seal.
    runs
        One run per cell and arm, in any order; each header carries the hash of the study. Cells with the
        same baseline share its run.

    Raises
    ------
    EvidenceError
        With every reason why the runs do not carry out the study: another task, split, prompt, sampling,
        grader, model, policy or budget than registered; missing or doubled samples; dev problems; runs
        that are missing or too many.
    """
    reasons: list[str] = []
    placed: dict[tuple[str, ArmName], Run] = {}
    for run in runs:
        reasons += [*sample_reasons(run), *dev_reasons(run)]
        if run.header.preregistration != study.sha256:
            reasons.append(
                f"run {run.header.run!r} was not made under this study: its header says "
                f"{run.header.preregistration!r}"
            )
        found, problems = locate(study, run.header)
        reasons += problems
        for cell, arm in found:
            place = (cell.name, arm)
            if place in placed:
                reasons.append(
                    f"runs {placed[place].header.run!r} and {run.header.run!r} are both {' '.join(place)}"
                )
            placed[place] = run
    pairs: dict[str, tuple[Run, Run]] = {}
    for cell in study.cells:
        missing = [arm for arm in _ARMS if (cell.name, arm) not in placed]
        reasons += [f"there is no run of {cell.name}, {arm}" for arm in missing]
        if not missing:
            pairs[cell.name] = placed[cell.name, "baseline"], placed[cell.name, "challenger"]
            reasons += setting_reasons(*pairs[cell.name], _registered_differences(study, cell))
    if reasons:
        raise EvidenceError(f"study {study.study!r} cannot be confirmed with these runs", reasons)
    analysis, comparisons = study.analysis, {}
    for name, pair in pairs.items():
        # A budget is never tuned on held-out problems: what they measure is reported as it is.
        notes = cache_reasons(*pair, on=study.memory.match, tolerance=study.memory.tolerance)
        comparisons[name] = measure(
            *pair,
            metric=analysis.metric,
            test=analysis.test,
            resamples=analysis.resamples,
            seed=analysis.seed,
            cells=len(study.cells),
            notes=[note.partition(": find a budget")[0] for note in notes],
        )
    decision = decide(
        {name: each.difference for name, each in comparisons.items()},
        correction=analysis.correction,
        alpha=analysis.alpha,
        branches=study.branches.model_dump(),
    )
    return Family(
        comparisons=comparisons,
        decision=decision,
        preregistration=study.sha256,
        deviations=study.deviations,
    )


def _registered_differences(study: Preregistration, cell: Cell) -> tuple[str, ...]:
    one, other = (study.arms.of(cell, side) for side in _ARMS)
    return tuple(name for name in ("seeds", "sampling") if getattr(one, name) != getattr(other, name))


def admit(header: RunHeader, study: Preregistration | None) -> RunHeader:
    """Let a run begin: on confirm problems only as a part of a frozen study, whose hash the header gets.

    Raises
    ------
    EvidenceError
        If held-out problems are asked for without a study, or the study does not contain this run.
    """
    if study is None:
        if header.split == "dev":
            return header
        raise EvidenceError(
            "confirm problems are held out",
            [
                "try things on --split dev",
                "to confirm, seal a plan with kvkeep study freeze FILE and name it with --prereg FILE",
            ],
        )
    header = dataclasses.replace(header, preregistration=study.sha256)
    reasons = locate(study, header)[1]
    if reasons:
        raise EvidenceError(f"this run is no part of study {study.study!r}", reasons)
    return header


def locate(study: Preregistration, header: RunHeader) -> tuple[list[tuple[Cell, ArmName]], list[str]]:
    """Where a run belongs in a study, and what in it is not as registered.

    :func:`admit` asks before a held-out problem is touched, :func:`confirm` asks again.

    Returns
    -------
    tuple
        Cells and arms: none, one, or all cells that share this baseline; and the reasons against the run.
    """
    name = f"run {header.run!r}"
    task = next((each for each in study.tasks if each.name == header.task), None)
    if task is None:
        return [], [f"{name} is on task {header.task!r}, which the study does not name"]
    registered = {
        "task_version": task.version,
        "task_sha256": task.sha256,
        "split": task.part,
        "split_rule": task.split,
        "ids_sha256": task.ids_sha256,
        "problems": task.problems,
        "grader": task.grader,
        "grader_version": task.grader_version,
        "draws": study.draws,
        "engine": "transformers",  # no study names another one
    }
    reasons = [
        f"{name}: {field} is {getattr(header, field)!r} and was registered as {value!r}"
        for field, value in registered.items()
        if getattr(header, field) != value
    ]
    found = _places(study, header)
    if not found:
        reasons.append(
            f"{name}: no cell has model {header.model!r} with these weights, policy {header.policy!r} with "
            f"these options, budget {dict(header.budget)} and seeds {list(header.seeds)}"
        )
    for cell, side in found[:1]:  # what cells with one baseline have in common
        facts = {
            **{field: (_plain(header)[field], value) for field, value in _own(study, cell, side).items()},
            "prompt_sha256": (header.prompt_sha256, cell.prompt_sha256),
            "gates_sha256": (header.gates_sha256, cell.gates_sha256.get(side)),
        }
        if header.calibration_sha256 is not None:
            facts["calibration_sha256"] = (header.calibration_sha256, cell.calibration_sha256)
        reasons += [
            f"{name}: {field} is {given!r} and was registered as {registered_as!r}"
            for field, (given, registered_as) in facts.items()
            if given != registered_as
        ]
    return found, reasons


def _places(study: Preregistration, header: RunHeader) -> list[tuple[Cell, ArmName]]:
    """One cell for a challenger; for a baseline, all cells that it is the baseline of."""
    found = []
    for cell in study.cells:
        model = next(each for each in study.models if each.name == cell.model)
        if (cell.task, model.name, model.sha256) == (header.task, header.model, header.model_sha256):
            found += [(cell, side) for side in _ARMS if _is_arm(study, cell, side, header)]
    # Arms may differ in how they draw or store alone: who does both as registered goes first.
    exact = [each for each in found if _own(study, *each) == _plain(header)] or found
    baselines = [each for each in exact if each[1] == "baseline"]
    return baselines or exact[:1]


def _own(study: Preregistration, cell: Cell, side: ArmName) -> dict[str, Any]:
    """How an arm draws and stores, beside its policy."""
    arm = study.arms.of(cell, side)
    return {
        "sampling": dict(arm.sampling or study.sampling),
        "precision": None if arm.precision is None else dict(arm.precision),
    }


def _plain(header: RunHeader) -> dict[str, Any]:
    """The same of a run."""
    precision = None if header.precision is None else dict(header.precision)
    return {"sampling": dict(header.sampling), "precision": precision}


def _is_arm(study: Preregistration, cell: Cell, arm: ArmName, header: RunHeader) -> bool:
    plan, entries = study.arms.of(cell, arm), getattr(cell, arm)
    budget = {} if entries is None else {"budget": Budget(entries=entries, prompt=plan.prompt)}
    registered = policy(plan.policy, **{**plan.options, **budget})
    return (
        registered.name == header.policy
        and plain(registered.options()) == plain(header.policy_options)
        and tuple(header.seeds) == (plan.seeds or study.seeds)
    )
