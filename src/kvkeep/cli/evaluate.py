"""`kvkeep eval`: run a task under a policy, and log every sample."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvkeep.cli import eval_setup as flags
from kvkeep.cli import options as opt
from kvkeep.cli.progress import progress
from kvkeep.core.errors import ConfigError

if TYPE_CHECKING:
    from kvkeep.evaluation.report.summary import Summary
    from kvkeep.evaluation.tasks.base import Task

app = typer.Typer(help="Run a task under a policy, and log every sample.", invoke_without_command=True)


@app.callback()
def evaluate(
    context: typer.Context,
    task: flags.TaskText = "trace",
    policy: opt.PolicyText = "vase-attnv",
    budget: opt.Entries = None,
    token_budget: opt.TokenBudget = None,
    prompt_mode: flags.TaskPromptMode = None,
    buffer: opt.Buffer = None,
    option: opt.PolicyOptions = None,
    calibration: opt.Calibration = None,
    gates: opt.Gates = None,
    kv_bits: opt.KvBits = None,
    kv_key_bits: opt.KvKeyBits = None,
    protect: opt.ProtectRule = None,
    kv_group: opt.KvGroup = None,
    kv_reserve: opt.KvReserve = None,
    kv_prompt: opt.KvPrompt = None,
    kv_sinks: opt.KvSinks = None,
    kv_recent: opt.KvRecent = None,
    prefill: opt.Prefill = None,
    prefill_chunk: opt.PrefillChunk = None,
    model: flags.TaskModel = None,
    data: flags.Data = None,
    split: flags.Part = "dev",
    limit: flags.Limit = None,
    draws: flags.Draws = 1,
    seed: Annotated[int, typer.Option(help="Of the first draw; the next ones count up.")] = 0,
    batch_size: flags.BatchSize = None,
    preset: flags.Preset = None,
    temperature: flags.Temperature = None,
    top_p: flags.TopP = None,
    top_k: flags.TopK = None,
    max_new_tokens: flags.MaxNew = None,
    repetition_rise: flags.RepetitionRise = None,
    repetition_ngram: flags.RepetitionNgram = None,
    repetition_window: flags.RepetitionWindow = None,
    refeed_every: flags.RefeedEvery = None,
    refeed_evictions: flags.RefeedEvictions = None,
    prompt: flags.PromptName = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the log of the run.")] = None,
    resume: flags.Resume = False,
    prereg: Annotated[
        Path | None, typer.Option(help="Frozen pre-registration that the run belongs to.")
    ] = None,
    ray: Annotated[bool, typer.Option("--ray", help="Spread the samples over a Ray cluster.")] = False,
    workers: Annotated[int | None, typer.Option(help="Ray workers, one model each [one a GPU].")] = None,
    engine: flags.Engine = "transformers",
    engine_option: flags.EngineOptions = None,
    log_evictions: Annotated[
        bool,
        typer.Option(
            "--log-evictions",
            help="Note of every eviction how large, how old and where from the entries are that go "
            "(kvkeep analyze loops reads it).",
        ),
    ] = False,
    threads: opt.Threads = None,
    dtype: opt.Dtype = "float32",
    attention: opt.Attention = "sdpa",
    device: opt.Device = "auto",
    as_json: opt.AsJson = False,
) -> None:
    """Run a task under a policy, and log every sample; `kvkeep eval split TASK` shows the split."""
    if context.invoked_subcommand is not None:
        return
    if out is None:
        raise ConfigError("name a folder for the run with --out, for example --out runs/first.")
    amount = opt.make_budget(budget, None, None, prompt_mode or kind_of(task).prompt_mode)
    chosen = opt.make_policy(
        policy,
        amount,
        buffer=buffer,
        prefill=prefill,
        prefill_chunk=prefill_chunk,
        options=option,
        token_budget=token_budget,
    )
    opt.refuse_unused(chosen, amount)
    setup = make_setup(
        task=task,
        data=data,
        model=model,
        policy=chosen,
        preset=preset,
        overrides={
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "max_new": max_new_tokens,
            "repetition_rise": repetition_rise,
            "repetition_ngram": repetition_ngram,
            "repetition_window": repetition_window,
            "refeed_every": refeed_every,
            "refeed_evictions": refeed_evictions,
        },
        prompt=prompt,
        calibration=calibration,
        gates=gates,
        precision=opt.make_precision(
            kv_bits, protect, kv_group, kv_reserve, kv_sinks, kv_recent, kv_prompt, kv_key_bits
        ),
        prefill_chunk=prefill_chunk,
        dtype=dtype,
        attention=attention,
        device=device,
        threads=threads,
        engine=engine,
        engine_options=flags.read_engine_options(engine_option),
        log_evictions=log_evictions,
    )
    from kvkeep.cli import report
    from kvkeep.evaluation import runner
    from kvkeep.evaluation.report.summary import summarise

    plan = runner.Plan(
        part=part(split),
        limit=limit,
        draws=draws,
        seed=seed,
        batch_size=kind_of(task).batch_size if batch_size is None else batch_size,
    )
    study = None if prereg is None else frozen(prereg)
    with writing(setup, ray=ray, workers=workers) as (generator, batches), progress() as show:
        run = runner.evaluate(
            setup.make_task(),
            generator,
            out,
            plan,
            resume=resume,
            command=sys.argv,
            on_progress=show,
            batches=batches,
            request=setup.request(),
            study=study,
        )
    summary = summarise(run)
    if as_json:
        typer.echo(report.as_json({"out": str(out), **summary.as_dict()}))
        return
    show_summary(summary, out)


@app.command("split")
def split_command(
    task: Annotated[str, typer.Argument(help="A task.")],
    data: flags.Data = None,
    as_json: opt.AsJson = False,
) -> None:
    """Show how the problems of a task are parted: counts and hashes of the ids."""
    from kvkeep.evaluation.splits import split
    from kvkeep.evaluation.tasks.registry import make_task

    with make_task(task, data=data) as chosen:
        facts = split([problem.id for problem in chosen.all_problems()]).as_dict()
    if as_json:
        typer.echo(json.dumps({"task": task, **facts}, indent=2))
        return
    for name in ("dev", "confirm"):
        found: Any = facts[name]
        typer.echo(f"{name}: {found['problems']} problems, sha256 of ids {found['ids_sha256']}")


@app.command("regrade")
def regrade_command(
    run: Annotated[Path, typer.Argument(help="A run that `kvkeep eval` wrote.")],
    out: Annotated[Path, typer.Option(help="Folder for the new log.")],
    data: flags.Data = None,
    as_json: opt.AsJson = False,
) -> None:
    """Grade the texts of a run again, into a new log, without generating anything."""
    from kvkeep.cli import report
    from kvkeep.core.errors import DataFileError
    from kvkeep.evaluation.regrade import regrade
    from kvkeep.evaluation.report.summary import summarise
    from kvkeep.evaluation.runlog import read_run
    from kvkeep.evaluation.tasks.registry import make_task

    header = read_run(run).header
    request = header.extra.get("request")
    if not request:
        raise DataFileError(f"run {header.run!r} does not say how its task was made.")
    summary = summarise(regrade(make_task(request["task"], data=data or request["data"]), run, out))
    if as_json:
        typer.echo(report.as_json({"out": str(out), **summary.as_dict()}))
        return
    show_summary(summary, out)


def part(name: str) -> Any:
    """Check the name of a part."""
    if name not in ("dev", "confirm"):
        raise ConfigError(f"--split {name!r} is unknown: use dev, or confirm with a frozen --prereg.")
    return name


def frozen(prereg: Path) -> Any:
    """Read a frozen pre-registration."""
    from kvkeep.evaluation.seal import load_frozen

    return load_frozen(prereg)


def kind_of(task: str) -> type[Task]:
    """The class of a task, for what it says of itself."""
    from kvkeep.evaluation.tasks.registry import parse, task_class

    return task_class(parse(task)[0])


def make_setup(*, task: str, model: str | None, overrides: dict[str, Any], **others: Any) -> flags.Setup:
    """Resolve names; nothing is loaded yet."""
    from kvkeep.cli import loading, report

    name = model or kind_of(task).default_model
    given = tuple((key, value) for key, value in overrides.items() if value is not None)
    return flags.Setup(
        task=task, model=loading.resolve(name, report.note), model_name=name, overrides=given, **others
    )


@contextmanager
def writing(setup: flags.Setup, *, ray: bool, workers: int | None) -> Iterator[tuple[Any, Any]]:
    """A generator, and how batches are spread over workers (``None``: one after another)."""
    from kvkeep.cli import report

    if workers is not None and not ray:
        raise ConfigError("--workers counts Ray workers: add --ray.")
    if ray and setup.engine != "transformers":
        raise ConfigError(f"--ray is for --engine transformers: {setup.engine} has workers of its own.")
    with report.waiting(f"loading {setup.model_name}"):
        if not ray:
            local = flags.make_generator(setup)
    if not ray:
        try:
            yield local, None
        finally:
            local.close()
        return
    from functools import partial

    from kvkeep.evaluation.ray_backend import RayGenerator

    with RayGenerator(partial(flags.make_generator, setup), workers=workers) as spread:
        yield spread, spread.write


def show_summary(summary: Summary, out: Path) -> None:
    """The result in a few lines."""
    from kvkeep.core.budget import format_bytes

    whole = f", {100 * summary.correct:.1f} % right in every part" if summary.metric == "score" else ""
    counts = [f"{count} {name}" for name, count in summary.outcomes.items() if count]
    bad = [f"{count} {name}" for name, count in summary.failure_classes.items() if count and name != "ok"]
    speed = summary.tokens_per_second
    alone = summary.mean_read_by_query
    query = "" if alone is None or alone >= summary.mean_read else f"; a query head reads {alone:.1f}"
    lines = [
        f"{summary.task}, {summary.model}, {summary.label}",
        f"  {summary.accuracy or f'{100 * summary.score:.1f} %'}{whole}",
        f"  samples: {', '.join(counts)}; texts: {', '.join(bad) or 'all ok'}",
        f"  cache: mean {summary.mean_cache:.1f}, peak {summary.peak_cache:.1f}, after the prompt "
        f"{summary.prefill_cache:.1f} entries per head"
        + (f"; the bytes of {summary.mean_memory:.1f} entries in 16 bits" if summary.weighed else "")
        + (f"; {format_bytes(summary.kv_bytes)} a batch" if summary.kv_bytes else ""),
        f"  read in a step: mean {summary.mean_read:.1f}, peak {summary.peak_read:.1f} entries per head"
        + query,
        f"  {summary.tokens:.0f} tokens a sample, {100 * summary.at_limit:.1f} % at the length limit"
        + ("" if speed is None else f", {speed:.0f} tokens/s"),
        f"  log: {out}",
    ]
    if summary.majority is not None and summary.any_of is not None:
        lines.insert(2, f"  {summary.majority}; {summary.any_of}")
    if summary.budget is not None and not summary.evictions:
        lines.insert(1, "  0 evicted: the policy never came into play.")
    for name, share in summary.parts.items():
        lines.insert(2, f"  {name}: {100 * share:.1f} %")
    typer.echo("\n".join(lines))
