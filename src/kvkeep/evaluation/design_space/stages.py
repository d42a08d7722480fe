"""The stages of the study: screen, match, seal, confirm. A run is a folder; what is there is not run again.

*Screening* is what one does to find ideas: few problems, one draw, one model, both arms asked for the same
budget, so that they hold equally much when the prompt has been read, and nobody looks at what they hold
later. *The strict protocol* is the standard of methods that last: 200 problems, the measured memory
matched on dev problems, the plan sealed, held-out problems, two models, correction for all comparisons.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from kvkeep.core.budget import Budget, PromptMode
from kvkeep.core.errors import ConfigError, EvidenceError, UnsupportedError
from kvkeep.core.files import atomic_path
from kvkeep.engine.mixing import policy_reasons
from kvkeep.evaluation.comparison import Comparison, compare
from kvkeep.evaluation.design_space.mechanisms import Arm, Mechanism
from kvkeep.evaluation.design_space.proxy import Nats
from kvkeep.evaluation.design_space.sealing import BASELINE, PLAN, seal
from kvkeep.evaluation.matching import match_budget
from kvkeep.evaluation.preregistration import Preregistration
from kvkeep.evaluation.records import Run
from kvkeep.evaluation.runner import Plan
from kvkeep.evaluation.seal import load_frozen, lock_path
from kvkeep.evaluation.study import Family, confirm
from kvkeep.evaluation.tasks.base import Task
from kvkeep.policies.compose import policy


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the study is about.

    Parameters
    ----------
    base, options
        A policy as text, and its settings.
    entries, prompt
        The budget that both arms of the screening ask for.
    models
        The first is the one that is screened on; all of them confirm.
    mechanisms
        What is tried.
    screened
        Problems of the screening.
    problems, draws
        Of the strict protocol, dev and held-out alike.
    tolerance
        Largest relative difference between mean memories that counts as equal.
    batch_size
        Samples written together; does not change results.
    """

    base: str
    options: Mapping[str, int] = field(default_factory=dict)
    entries: int
    prompt: PromptMode
    models: Sequence[str]
    mechanisms: Sequence[Mechanism]
    screened: int = 50
    problems: int = 200
    draws: int = 1
    tolerance: float = 0.01
    batch_size: int = 64

    def __post_init__(self) -> None:
        for name in ("screened", "problems", "draws"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} {getattr(self, name)} is below 1.")
        if not 0 < self.tolerance < 1:  # no measured mean is equal to the last digit
            raise ConfigError(f"tolerance {self.tolerance} is outside (0, 1): 0.01 is 1 %.")
        if not self.baseline().policy.bounded:
            raise ConfigError(
                f"{self.base} keeps everything, so there is no budget to match: study a policy that evicts."
            )
        for mechanism in self.mechanisms:  # what cannot be built is said before anything is run
            arm = self.arm(mechanism)
            if arm.precision is not None and (reasons := policy_reasons(arm.precision, arm.policy)):
                raise UnsupportedError(f"{mechanism.name} with {self.base}", reasons)

    @property
    def budget(self) -> Budget:
        """Of both arms of the screening."""
        return Budget(entries=self.entries, prompt=self.prompt)

    def baseline(self) -> Arm:
        """The policy as it is."""
        return Arm(policy=policy(self.base, budget=self.budget, **self.options))

    def arm(self, mechanism: Mechanism) -> Arm:
        """The policy with a mechanism, at the same budget."""
        return mechanism.arm(self.base, self.budget, **self.options)


class Bench(Protocol):
    """Carries runs out."""

    def task(self) -> Task:
        """The task of the study."""
        ...

    def run(self, arm: Arm, model: str, out: Path, plan: Plan, study: Preregistration | None = None) -> Run:
        """One run, or what is left of it."""
        ...

    def nats(self, arm: Arm, model: str) -> Nats | None:
        """How well the right answers are predicted under an arm; ``None`` where that means nothing."""
        ...


class Stages:
    """The stages over one folder.

    Parameters
    ----------
    settings
        What is studied.
    bench
        Who carries runs out.
    out
        Folder for everything.
    on_stage
        Called with a sentence when something begins.
    """

    def __init__(
        self, settings: Settings, bench: Bench, out: Path, on_stage: Callable[[str], None] = lambda text: None
    ) -> None:
        self.settings, self.bench, self.out, self._say = settings, bench, out, on_stage

    def check_sealed(self) -> None:
        """Refuse other mechanisms than the plan names, if it is sealed already: before anything is run.

        Raises
        ------
        EvidenceError
            If the sealed plan is of other mechanisms, or was changed.
        """
        path = self.out / PLAN
        if not lock_path(path).exists():
            return
        sealed, asked = (
            set(load_frozen(path).arms.challengers),
            {each.name for each in self.settings.mechanisms},
        )
        if sealed != asked:
            raise EvidenceError(
                f"{path} is sealed",
                [
                    f"its mechanisms are {', '.join(sorted(sealed))}, and {', '.join(sorted(asked))} were "
                    "asked for: name the same ones, or choose another --out"
                ],
            )

    def screen(self) -> dict[str, Comparison]:
        """The cheap look at every mechanism, by name."""
        settings, model = self.settings, self.settings.models[0]
        plan = Plan(limit=settings.screened, batch_size=settings.batch_size)
        self._say(f"screening: {settings.base} on {settings.screened} problems")
        baseline = self.bench.run(settings.baseline(), model, self.out / "screen" / BASELINE, plan)
        found = {}
        for number, mechanism in self._numbered():
            self._say(f"screening {number}: {mechanism.name}")
            run = self.bench.run(settings.arm(mechanism), model, self.out / "screen" / mechanism.name, plan)
            found[mechanism.name] = compare(baseline, run, on="prefill_memory", allow=_allowed(mechanism))
        return found

    def match(self) -> dict[str, dict[str, tuple[Run, Run]]]:
        """Baseline and challenger at one mean memory on dev problems, by mechanism and model."""
        settings = self.settings
        plan = Plan(limit=settings.problems, draws=settings.draws, batch_size=settings.batch_size)
        pairs: dict[str, dict[str, tuple[Run, Run]]] = {each.name: {} for each in settings.mechanisms}
        for model in settings.models:
            home = self.out / "dev" / Path(model).name
            self._say(f"matching on {model}: {settings.base} on {settings.problems} dev problems")
            baseline = self.bench.run(settings.baseline(), model, home / BASELINE, plan)
            for number, mechanism in self._numbered():
                self._say(f"matching on {model} {number}: {mechanism.name}")
                run = self._matched(settings.arm(mechanism), model, home / mechanism.name, plan, baseline)
                pairs[mechanism.name][model] = (baseline, run)
        return pairs

    def _matched(self, arm: Arm, model: str, home: Path, plan: Plan, baseline: Run) -> Run:
        """The run whose mean memory equals that of the baseline, or comes nearest."""
        tried: dict[int, Run | None] = {}

        def measure(entries: int) -> Run:
            tried[entries] = None
            run = self.bench.run(arm.with_entries(entries), model, home / f"budget-{entries}", plan)
            tried[entries] = run
            return run

        # Where few bits weigh what they weigh, and not what their name says.
        start = arm.with_entries(self.settings.entries).weighing().policy.amount.count
        high = 2 * start
        try:
            match_budget(
                measure,
                baseline,
                low=arm.policy.smallest_budget(high),
                high=high,
                start=start,
                on="mean_memory",
                tolerance=self.settings.tolerance,
                allow=_sampling(arm),
            )
        except ConfigError:
            if None in tried.values():  # a run could not be carried out
                raise
            # No budget comes that close: the result says how far off.
        found = [run for run in tried.values() if run is not None]
        return min(found, key=lambda run: abs(run.mean_memory - baseline.mean_memory))

    def dev(self, pairs: Mapping[str, Mapping[str, tuple[Run, Run]]]) -> dict[str, dict[str, Comparison]]:
        """What the matched dev runs say, by mechanism and model."""
        allow = {each.name: {*_allowed(each), "cache"} for each in self.settings.mechanisms}
        return {
            name: {
                model: compare(*pair, on="mean_memory", allow=allow[name]) for model, pair in by_model.items()
            }
            for name, by_model in pairs.items()
        }

    def seal(self, pairs: Mapping[str, Mapping[str, tuple[Run, Run]]]) -> Preregistration:
        """The plan, frozen before the first held-out problem is touched."""
        self._say("sealing the plan")
        return seal(self.out / PLAN, self.settings, pairs, self.bench.task())

    def confirm(self, study: Preregistration, pairs: Mapping[str, Mapping[str, tuple[Run, Run]]]) -> Family:
        """The held-out problems."""
        settings = self.settings
        plan = Plan(
            part="confirm",
            limit=settings.problems,
            draws=settings.draws,
            batch_size=settings.batch_size,
        )
        runs = []
        for model in settings.models:
            home = self.out / "confirm" / Path(model).name
            self._say(f"confirming on {model}: {settings.base} on {settings.problems} held-out problems")
            runs.append(self.bench.run(settings.baseline(), model, home / BASELINE, plan, study))
            for number, mechanism in self._numbered():
                self._say(f"confirming on {model} {number}: {mechanism.name}")
                entries = pairs[mechanism.name][model][1].header.budget["entries"]
                arm = settings.arm(mechanism).with_entries(entries)
                runs.append(self.bench.run(arm, model, home / mechanism.name, plan, study))
        return confirm(study, runs)

    def nats(self, pairs: Mapping[str, Mapping[str, tuple[Run, Run]]]) -> dict[str, tuple[Nats, Nats]]:
        """The internal number, baseline and challenger, at the budgets that were matched."""
        settings = self.settings
        baseline = self._nats(BASELINE, settings.baseline())
        found = {}
        for number, mechanism in self._numbered():
            self._say(f"predicting right answers {number}: {mechanism.name}")
            entries = pairs[mechanism.name][settings.models[0]][1].header.budget["entries"]
            nats = self._nats(mechanism.name, settings.arm(mechanism).with_entries(entries))
            if baseline is not None and nats is not None:
                found[mechanism.name] = (baseline, nats)
        return found

    def _nats(self, name: str, arm: Arm) -> Nats | None:
        """What was read before, or reads it."""
        path = self.out / "nats" / f"{name}-{arm.policy.amount.count}.json"
        if path.exists() and (found := Nats.from_json(path.read_text(encoding="utf-8"))) is not None:
            return found
        nats = self.bench.nats(arm, self.settings.models[0])
        if nats is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_path(path) as temporary:
                temporary.write_text(nats.as_json(), encoding="utf-8")
        return nats

    def _numbered(self) -> Iterator[tuple[str, Mechanism]]:
        every = self.settings.mechanisms
        for place, mechanism in enumerate(every, 1):
            yield f"{place}/{len(every)}", mechanism


def _sampling(arm: Arm) -> tuple[str, ...]:
    return ("sampling",) if arm.sampling else ()


def _allowed(mechanism: Mechanism) -> tuple[str, ...]:
    """A mechanism of decoding is a difference in sampling."""
    return ("sampling",) if mechanism.sampling else ()
