"""`kvkeep study design-space`: mechanisms beside a policy, screened cheaply and then tested strictly."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from kvkeep.cli.eval_setup import BatchSize
from kvkeep.cli.options import AsJson, Threads
from kvkeep.cli.tables import show_table
from kvkeep.core.errors import ConfigError

if TYPE_CHECKING:
    from kvkeep.cli.eval_setup import Setup
    from kvkeep.evaluation.design_space.mechanisms import Arm, Mechanism
    from kvkeep.evaluation.design_space.proxy import Nats
    from kvkeep.evaluation.design_space.result import Result
    from kvkeep.evaluation.generator import ModelGenerator
    from kvkeep.evaluation.preregistration import Preregistration
    from kvkeep.evaluation.records import Run, RunHeader
    from kvkeep.evaluation.runner import Plan
    from kvkeep.evaluation.tasks.base import Task


def design_space(
    out: Annotated[
        Path | None, typer.Option(help="Folder for all runs; a second call goes on where the first stopped.")
    ] = None,
    base: Annotated[str, typer.Option(help="The policy that mechanisms are added to.")] = "snapkv(window=16)",
    budget: Annotated[int, typer.Option(help="Entries of the base.")] = 90,
    buffer: Annotated[int, typer.Option(help="Period of the base's evictions, in tokens.")] = 16,
    task: Annotated[str, typer.Option(help="A task that parts its problems.")] = "trace",
    model: Annotated[
        list[str] | None,
        typer.Option(help="Screen on the first, confirm on all. Repeatable [trace-1 and trace-2]."),
    ] = None,
    mechanism: Annotated[
        list[str] | None, typer.Option(help="Try this one. Repeatable [all of --show].")
    ] = None,
    screened: Annotated[int, typer.Option(help="Problems of the screening.")] = 50,
    problems: Annotated[int, typer.Option(help="Problems of the strict protocol, dev and held-out.")] = 200,
    draws: Annotated[int, typer.Option(help="Samples per problem of the strict protocol.")] = 1,
    tolerance: Annotated[float, typer.Option(help="Largest relative difference of mean memories.")] = 0.01,
    screen_only: Annotated[bool, typer.Option("--screen-only", help="Stop after the screening.")] = False,
    show: Annotated[bool, typer.Option("--show", help="List the mechanisms and run nothing.")] = False,
    page: Annotated[Path | None, typer.Option(help="Also write the tables to this Markdown file.")] = None,
    batch_size: BatchSize = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Screen mechanisms cheaply, test them strictly, and show which gains are left.

    Screening: few problems, equal budgets. Strict: mean cache matched on dev problems, a sealed plan,
    held-out problems, two models, Holm's correction over all comparisons, and six named ways to be wrong.
    """
    from kvkeep.evaluation.design_space.mechanisms import chosen

    mechanisms = chosen(mechanism or ())
    if show:
        show_mechanisms(mechanisms, as_json=as_json)
        return
    if out is None:
        raise ConfigError("name a folder for the runs with --out, for example --out runs/design-space.")
    models = model or ["trace-1", "trace-2"]
    if len({Path(each).name for each in models}) < len(models):
        raise ConfigError(f"models {models}: two have the same name, and their runs would mix.")
    from kvkeep.cli import report
    from kvkeep.cli.evaluate import kind_of
    from kvkeep.evaluation.design_space import result as results
    from kvkeep.evaluation.design_space.stages import Settings, Stages

    settings = Settings(
        base=base,
        options={"buffer": buffer},
        entries=budget,
        prompt=kind_of(task).prompt_mode,
        models=models,
        mechanisms=mechanisms,
        screened=screened,
        problems=problems,
        draws=draws,
        tolerance=tolerance,
        batch_size=kind_of(task).batch_size if batch_size is None else batch_size,
    )
    stages = Stages(settings, SetupBench(task_text=task, threads=threads), out, on_stage=report.note)
    found = results.screening(stages) if screen_only else results.whole(stages)
    if page is not None:
        from kvkeep.core.files import atomic_path

        with atomic_path(page) as temporary:
            temporary.write_text(as_page(found, sys.argv[1:]), encoding="utf-8")
    if as_json:
        typer.echo(report.as_json({"out": str(out), **found.as_dict()}))
        return
    show_result(found)


@dataclass
class SetupBench:
    """Runs with transformers, one model in memory at a time.

    Parameters
    ----------
    task_text, threads
        As for ``kvkeep eval``.
    """

    task_text: str
    threads: int | None = None
    _loaded: tuple[str, ModelGenerator] | None = field(default=None, repr=False)

    def task(self) -> Task:
        """The task."""
        from kvkeep.evaluation.tasks.registry import make_task

        return make_task(self.task_text)

    def run(self, arm: Arm, model: str, out: Path, plan: Plan, study: Preregistration | None = None) -> Run:
        """One run, or what is left of it.

        Raises
        ------
        ConfigError
            If the folder holds a run with other settings.
        """
        from kvkeep.cli.eval_line import eval_line
        from kvkeep.cli.progress import progress
        from kvkeep.evaluation import runner
        from kvkeep.evaluation.design_space.sealing import PLAN
        from kvkeep.evaluation.runlog import log_path, read_log

        setup = self._setup(arm, model)
        if log_path(out).exists() and (log := read_log(out)).footer is not None:
            # No model is loaded for what is done, so its header is checked here and not by the runner.
            check_same(log.run.header, setup, plan, out)
            return log.run
        with self.task() as task, progress() as show:
            generator = self._generator(setup).with_policy(arm.policy).with_sampling(setup.sampling(task))
            generator = generator.with_precision(arm.precision)
            return runner.evaluate(
                task,
                generator,
                out,
                plan,
                resume=True,
                command=sys.argv,
                on_progress=show,
                request={
                    **setup.request(),
                    "limit": plan.limit,
                    "alone": eval_line(setup, arm, plan, None if study is None else Path(PLAN)),
                },
                study=study,
            )

    def nats(self, arm: Arm, model: str) -> Nats | None:
        """How well the right answers are predicted."""
        from kvkeep.evaluation.design_space.proxy import nats

        generator = self._generator(self._setup(arm, model))
        with self.task() as task:
            return nats(generator.model, generator.tokenizer, task, arm)

    def _setup(self, arm: Arm, model: str) -> Setup:
        from kvkeep.cli.evaluate import make_setup

        return make_setup(
            task=self.task_text,
            data=None,
            model=model,
            policy=arm.policy,
            overrides=dict(arm.sampling),
            precision=arm.precision,
            threads=self.threads,
        )

    def _generator(self, setup: Setup) -> ModelGenerator:
        from kvkeep.cli.eval_setup import make_generator

        if self._loaded is None or self._loaded[0] != setup.model:
            self._loaded = (setup.model, cast("ModelGenerator", make_generator(setup)))
        return self._loaded[1]


def check_same(header: RunHeader, setup: Setup, plan: Plan, out: Path) -> None:
    """Refuse a finished run that was asked for with other settings.

    Raises
    ------
    ConfigError
        Naming what differs.
    """
    from kvkeep.evaluation.identity import plain

    then = header.extra.get("request", {})
    pairs = {
        "--task": (then.get("task", setup.task), setup.task),
        "--model": (then.get("model_name", setup.model_name), setup.model_name),
        "policy": (header.policy, setup.policy.name),
        **_options(plain(header.policy_options), plain(setup.policy.options())),
        "precision": (
            plain(header.precision),
            None if setup.precision is None else setup.precision.as_dict(),
        ),
        "sampling": (plain(then.get("overrides", [])), plain(setup.overrides)),
        "problems": (then.get("limit", header.problems), plan.limit),
        "--draws": (header.draws, plan.draws),
    }
    differing = [f"{name} {was!r} instead of {now!r}" for name, (was, now) in pairs.items() if was != now]
    if differing:
        raise ConfigError(
            f"{out} holds a run of another study: {'; '.join(differing)}. Choose another --out, or call "
            "with the settings of the first time."
        )


def _options(then: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Both values of every setting of a policy, by name."""
    names = dict.fromkeys((*then, *now))
    return {f"setting {name}": (then.get(name), now.get(name)) for name in names}


def show_mechanisms(mechanisms: Sequence[Mechanism], *, as_json: bool) -> None:
    """What there is to be tried."""
    if as_json:
        typer.echo(json.dumps([asdict(each) for each in mechanisms], indent=2))
        return
    rows = [(each.name, each.family, each.does, each.switch) for each in mechanisms]
    show_table(
        ("mechanism", "family", "what it does", "switch"),
        rows,
        texts={"mechanism": 14, "family": 8, "what it does": 24, "switch": 20},
    )


def show_result(found: Result) -> None:
    """The two columns, the diagnostics, and which gains are left."""
    from kvkeep.cli import report
    from kvkeep.evaluation.report import design_space_tables as tables

    for table in (tables.gains_table(found), tables.diagnostics_table(found)):
        if table.rows:
            names = table.columns
            show_table(names, [[cell.strip("*") for cell in row] for row in table.rows], texts={names[0]: 14})
        if table.note:
            report.aside(table.note)
    for reason in tables.reasons(found):
        report.aside(reason)
    if found.family is not None:
        typer.echo(tables.outcome(found))


def as_page(found: Result, words: Sequence[str]) -> str:
    """The tables as Markdown."""
    from kvkeep.evaluation.report import design_space_tables as tables

    parts = [
        f"# The design space of {found.settings.base}",
        f"Written by `kvkeep {' '.join(words)}`.",
        tables.gains_table(found).markdown(),
    ]
    if found.family is not None:
        parts += [
            tables.outcome(found),
            "## Six ways to be wrong",
            tables.diagnostics_table(found).markdown(),
            "\n".join(f"* {reason}" for reason in tables.reasons(found)),
        ]
    parts += ["## The mechanisms", tables.mechanisms_table(found).markdown()]
    return "\n\n".join(part for part in parts if part) + "\n"
