"""What will be tested, written down and sealed before the held-out problems are touched.

A study is a YAML file. Freezing writes the hash of its content beside it; from then on only its list of
deviations may grow. The program, not the author, names the outcome afterwards.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from kvkeep.core.errors import MissingExtraError
from kvkeep.evaluation.splits import RULE
from kvkeep.evaluation.statistics.correction import Correction
from kvkeep.evaluation.statistics.decision import BRANCHES
from kvkeep.evaluation.statistics.paired import Test

try:
    from pydantic import BaseModel, ConfigDict, Field, model_validator
except ImportError as error:
    raise MissingExtraError("pydantic", "eval", "a pre-registration") from error

Hash = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Some = Annotated[int, Field(ge=1)]
ArmName = Literal["baseline", "challenger"]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Hypothesis(_Part):
    """A sentence that can turn out wrong."""

    id: str
    text: str


class TaskPlan(_Part):
    """The problems: by hash, held out, with their grader."""

    name: str
    version: str
    sha256: Hash
    part: Literal["confirm"]
    ids_sha256: Hash
    problems: Some
    grader: str
    grader_version: str
    split: Literal["md5-mod5"] = RULE


class ModelPlan(_Part):
    """A model: by the hash of its weights."""

    name: str
    sha256: Hash


class Arm(_Part):
    """A policy as the command line names it, with options.

    ``seeds`` and ``sampling`` only where an arm differs from the study in them; ``precision`` as in a run's
    header, only where its entries are in few bits.
    """

    policy: str
    options: Mapping[str, Any] = Field(default_factory=dict)
    prompt: Literal["counts", "kept"] = "counts"
    seeds: tuple[int, ...] | None = None
    sampling: Mapping[str, Any] | None = None
    precision: Mapping[str, Any] | None = None


class Arms(_Part):
    """Who is compared with whom: one challenger, or several by name, which the cells choose from."""

    baseline: Arm
    challenger: Arm | None = None
    challengers: Mapping[str, Arm] = Field(default_factory=dict)

    def of(self, cell: Cell, side: ArmName) -> Arm:
        """One side of a cell."""
        if side == "baseline":
            return self.baseline
        found = self.challenger if cell.arm is None else self.challengers[cell.arm]
        assert found is not None  # the study was validated
        return found

    def all(self) -> tuple[Arm, ...]:
        """Every arm."""
        return (self.baseline, *filter(None, [self.challenger]), *self.challengers.values())


class Cell(_Part):
    """One comparison: a task, a model, and the budgets of the arms, matched on dev problems.

    ``arm``: which challenger, where there are several. ``calibration_sha256``: statistics of the model, where
    a policy reads them. ``gates_sha256``: retention gates, by the arm that reads them.
    """

    task: str
    model: str
    arm: str | None = None
    baseline: Some | None = None
    challenger: Some | None = None
    prompt_sha256: Hash
    calibration_sha256: Hash | None = None
    gates_sha256: Mapping[Literal["baseline", "challenger"], Hash] = Field(default_factory=dict)

    @property
    def name(self) -> str:
        """``"trace/tiny-a/64"``: task, model and budgets, and the challenger where there are several."""
        budgets = [str(entries) for entries in dict.fromkeys((self.baseline, self.challenger)) if entries]
        named = "" if self.arm is None else f"/{self.arm}"
        return f"{self.task}/{self.model}/{'-'.join(budgets) or 'full'}{named}"


class Memory(_Part):
    """How the arms were given equal memory: ``mean_memory`` (bytes) where their entries differ in width."""

    match: Literal["mean_cache", "prefill_cache", "mean_memory"] = "mean_cache"
    tolerance: Annotated[float, Field(gt=0, lt=1)] = 0.02


class Analysis(_Part):
    """The numbers that will be computed, and no others."""

    metric: Literal["accuracy", "score"] = "accuracy"
    test: Test = "bootstrap"
    resamples: Annotated[int, Field(ge=1000)] = 10_000
    seed: int
    correction: Correction
    alpha: Annotated[float, Field(gt=0, lt=0.5)] = 0.05


class Branches(_Part):
    """What follows: A if a cell is better and none worse, B if nothing is significant, C if any is worse."""

    A: str = BRANCHES["A"]
    B: str = BRANCHES["B"]
    C: str = BRANCHES["C"]


class DevEvidence(_Part):
    """What the development problems said, and how the settings were chosen from it."""

    runs: tuple[str, ...] = ()
    selected: Mapping[str, Any] = Field(default_factory=dict)
    rule: str = ""


class Preregistration(_Part):
    """A study.

    Parameters
    ----------
    study, question, hypotheses
        What is asked.
    tasks, models, arms, cells
        What is run: every cell is one comparison of the two arms, and all cells are one family.
    sampling, draws, seeds
        How texts are drawn: the settings as in a run's header.
    memory, analysis
        How memory is matched, and what is computed.
    exclusions, stopping
        Which samples are left out, and when sampling ends.
    branches
        What follows from each outcome.
    dev_evidence
        Where the settings come from.
    deviations
        What was done otherwise, added after freezing; not part of the sealed content.
    """

    format: Literal[1]
    study: str
    question: str
    hypotheses: Annotated[tuple[Hypothesis, ...], Field(min_length=1)]
    tasks: Annotated[tuple[TaskPlan, ...], Field(min_length=1)]
    models: Annotated[tuple[ModelPlan, ...], Field(min_length=1)]
    arms: Arms
    cells: Annotated[tuple[Cell, ...], Field(min_length=1)]
    sampling: Mapping[str, Any]
    draws: Some
    seeds: tuple[int, ...]
    memory: Memory = Memory()
    analysis: Analysis
    exclusions: str = "none: a sample that crashed is run again with its seed"
    stopping: str = "all samples of all cells; no interim look"
    branches: Branches = Branches()
    dev_evidence: DevEvidence = DevEvidence()
    deviations: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        problems = []
        if (self.arms.challenger is None) == (not self.arms.challengers):
            problems.append("arms has a challenger, or challengers by name: one of the two")
        for cell in self.cells:
            if cell.arm not in (self.arms.challengers or {None}):
                problems.append(
                    f"cell {cell.name} names arm {cell.arm!r}: use one of {sorted(self.arms.challengers)}"
                    if self.arms.challengers
                    else f"cell {cell.name} names arm {cell.arm!r}, and there is one challenger only"
                )
            if cell.task not in {task.name for task in self.tasks}:
                problems.append(f"cell {cell.name} names task {cell.task!r}, which is not under tasks")
            if cell.model not in {model.name for model in self.models}:
                problems.append(f"cell {cell.name} names model {cell.model!r}, which is not under models")
        widths = {json.dumps(dict(arm.precision or {}), sort_keys=True) for arm in self.arms.all()}
        if len(widths) > 1 and self.memory.match != "mean_memory":
            problems.append(
                f"arms store their entries in different precisions, and memory matches {self.memory.match}: "
                "equal entries are not equal bytes; match on mean_memory"
            )
        for what, names in (
            ("cells", [cell.name for cell in self.cells]),
            ("tasks", [task.name for task in self.tasks]),
            ("models", [model.name for model in self.models]),
        ):
            if len(set(names)) < len(names):
                problems.append(f"two {what} have the same name")
        for seeds in (self.seeds, *(arm.seeds for arm in self.arms.all())):
            if seeds is not None and len(set(seeds)) != self.draws:
                problems.append(f"{self.draws} draws need {self.draws} different seeds, not {list(seeds)}")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def sha256(self) -> str:
        """Hash of the content, deviations excepted: comments, order of keys and spacing do not matter."""
        content = self.model_dump(mode="json", exclude={"deviations"})
        # Studies sealed before there were such fields keep their hash.
        arms = content["arms"]
        for place in (arms, arms["baseline"], arms["challenger"], *arms["challengers"].values()):
            _drop_empty(place or {}, "challengers", "sampling", "precision")
        for cell in content["cells"]:
            _drop_empty(cell, "gates_sha256", "arm")
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _drop_empty(content: dict[str, Any], *names: str) -> None:
    for name in names:
        if not content.get(name, True):
            del content[name]
