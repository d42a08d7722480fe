"""`kvkeep analyze dilution`: attention on the evidence as distractors grow, before and after eviction."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvkeep.cli import eval_setup as flags
from kvkeep.cli import options as opt
from kvkeep.core.errors import ConfigError

if TYPE_CHECKING:
    from kvkeep.cli.loading import Loaded
    from kvkeep.core.policy import Policy
    from kvkeep.evaluation.dilution_summary import Dilution, Mean, Setting
    from kvkeep.evaluation.evidence import Reading
    from kvkeep.evaluation.tasks.base import Task

DISTRACTORS = "distractors"

_TOKENS_AT_ONCE = 16_384  # of a batch: what the logits of a small model take stays below a gigabyte


def dilution(
    task: Annotated[
        str, typer.Option("--task", help="trace or needle, with settings in brackets: 'trace(size=L)'.")
    ] = "trace",
    distractors: Annotated[
        str | None, typer.Option("--distractors", help="Values of the task's dial of that name [0,10,20].")
    ] = None,
    vary: Annotated[
        str | None, typer.Option(help="Turn another dial of the task instead: 'steps=30,45,60'.")
    ] = None,
    reads: Annotated[
        str,
        typer.Option(
            help="values: what a register holds, the number of a needle. program: the next word of an "
            "instruction (trace)."
        ),
    ] = "values",
    policy: opt.PolicyText = "vase-attnv",
    budget: opt.Entries = None,
    prompt_mode: flags.TaskPromptMode = None,
    buffer: opt.Buffer = None,
    option: opt.PolicyOptions = None,
    prefill: opt.Prefill = None,
    calibration: opt.Calibration = None,
    gates: opt.Gates = None,
    model: flags.TaskModel = None,
    limit: Annotated[int, typer.Option(help="Development problems of each setting.")] = 16,
    seed: opt.Seed = 0,
    plot: Annotated[Path | None, typer.Option(help="Draw the table as an SVG file.")] = None,
    threads: opt.Threads = None,
    dtype: opt.Dtype = "float32",
    attention: opt.Attention = "sdpa",
    device: opt.Device = "auto",
    as_json: opt.AsJson = False,
) -> None:
    """Measure how much attention falls on the evidence as distractors grow, before and after eviction.

    The right answer is read with the full cache and under the policy (teacher-forced). The reading head is
    the one with the most mass on the evidence at the first setting.
    """
    from kvkeep.cli import loading, report
    from kvkeep.cli.evaluate import kind_of

    name, values = dial(distractors, vary)
    if limit < 1:
        raise ConfigError(f"--limit {limit} leaves no problem: give at least 1.")
    kind = kind_of(task)
    if prefill is None and kind.prompt_mode == "counts":
        prefill = "after"  # an answer of a few tokens would end before the first eviction of a deferred one
    amount = opt.make_budget(budget, None, None, prompt_mode or kind.prompt_mode)
    chosen = opt.make_policy(policy, amount, buffer=buffer, prefill=prefill, options=option)
    opt.require_calibration(chosen, calibration)
    opt.require_gates(chosen, gates)
    from kvkeep.evaluation.tasks.registry import make_task, with_setting

    tasks = [make_task(with_setting(task, name, value)) for value in values]
    model_name = model or kind.default_model
    source = loading.resolve(model_name, report.note)
    with report.waiting(f"loading {model_name}"):
        loaded = loading.load_model(source, dtype=dtype, attention=attention, device=device, threads=threads)
    settings = measure_all(
        loaded,
        chosen,
        dict(zip(values, tasks, strict=True)),
        reads=reads,
        limit=limit,
        seed=seed,
        calibration=loading.load_calibration(calibration, loaded),
        gates=loading.load_gates(gates, loaded),
    )
    if plot is not None:
        from kvkeep.core.files import atomic_path
        from kvkeep.evaluation.report.dilution_figure import dilution_figure

        with atomic_path(plot) as temporary:
            temporary.write_text(dilution_figure(settings, name, chosen.name), encoding="utf-8")
    if as_json:
        from kvkeep.evaluation.identity import plain, versions, weights_sha256

        facts: dict[str, Any] = {
            "command": ["kvkeep", *sys.argv[1:]],
            "task": task,
            "dial": name,
            "reads": reads,
            "model": model_name,
            "model_sha256": weights_sha256(loaded.model),
            "policy": {"name": chosen.name, "options": plain(chosen.options())},
            "seed": seed,
            "versions": versions(),
            "settings": [setting.as_dict() for setting in settings],
        }
        typer.echo(report.as_json(facts))
        return
    show(settings, name, chosen)


def dial(distractors: str | None, vary: str | None) -> tuple[str, list[float]]:
    """Name and values of the dial that is turned.

    Raises
    ------
    ConfigError
        If two are named, or what is given is no list of numbers.

    Examples
    --------
    >>> dial("0,4", None), dial(None, "steps=30,60")
    (('distractors', [0, 4]), ('steps', [30, 60]))
    """
    if distractors is not None and vary is not None:
        raise ConfigError("--distractors and --vary each turn a dial: give one of them.")
    name, _, text = (vary or f"{DISTRACTORS}={distractors or '0,10,20'}").partition("=")
    try:
        values = [float(each) for each in text.split(",")]
    except ValueError as error:
        raise ConfigError(
            f"cannot read {vary or distractors!r}: write --distractors 0,10,20 or --vary steps=30,60."
        ) from error
    return name.strip(), [int(value) if value.is_integer() else value for value in values]


def measure_all(
    loaded: Loaded,
    policy: Policy,
    tasks: dict[float, Task],
    *,
    reads: str,
    limit: int,
    seed: int,
    calibration: Any,
    gates: Any,
) -> list[Setting]:
    """Each setting of the dial in turn; the reading head is that of the first."""
    from kvkeep.cli.calibrate import bar
    from kvkeep.evaluation.dilution_run import measure
    from kvkeep.evaluation.dilution_summary import reading_head, summarise
    from kvkeep.evaluation.evidence import readings
    from kvkeep.evaluation.jobs import Job

    settings: list[Setting] = []
    head = None
    with bar() as show_progress:
        for number, (value, task) in enumerate(tasks.items()):
            task.bind(lambda text: len(loaded.tokenizer(text, verbose=False)["input_ids"]))
            problems = task.problems("dev", limit)
            names = {one.id: Job(problem=one, draw=0, seed=seed).sequence_id for one in problems}
            found = []
            texts = readings(task, problems, loaded.tokenizer, reads)  # type: ignore[arg-type]
            for batch in batches(texts):
                found += measure(
                    loaded.model,
                    policy,
                    batch,
                    names=[names[reading.id] for reading in batch],
                    seed=seed,
                    calibration=calibration,
                    gates=gates,
                )
                show_progress(number * limit + len(found), len(tasks) * limit)
            head = head or reading_head(found)
            settings.append(summarise(value, found, [len(text.tokens) for text in texts], head))
    return settings


def batches(texts: list[Reading]) -> list[list[Reading]]:
    """Cut into batches of at most so many tokens, one text at least."""
    size = max(1, _TOKENS_AT_ONCE // max(len(text.tokens) for text in texts) // 2)
    return [texts[start : start + size] for start in range(0, len(texts), size)]


def show(settings: list[Setting], name: str, policy: Policy) -> None:
    """Two tables: attention, and what was predicted."""
    from rich.console import Console

    from kvkeep.cli.tables import show_table

    console = Console()
    columns = ("mass full", "evicted", "predicted", "bound", "gap", "rivals", "rho_U", "rho_D", "rho_U>rho_D")
    rows = [attention_row(setting, head) for setting in settings for head in setting.heads]
    show_table((name, "head", *columns), rows, texts={}, console=console)
    console.print()
    counts = ("problems", "reads", "tokens", "entries seen", "mean cache", "right full", "right evicted")
    lines = [
        (
            f"{setting.dial:g}",
            f"{setting.problems}",
            f"{setting.queries}",
            f"{setting.tokens:.0f}",
            f"{setting.evidence + setting.distractors:.0f}",
            f"{setting.mean_cache:.1f}",
            percent(setting.right_full),
            percent(setting.right_evicted),
            percent(setting.right_difference, "+"),
        )
        for setting in settings
    ]
    show_table((name, *counts, "difference"), lines, texts={}, console=console)
    asked = f" at {policy.amount}" if policy.bounded else ""
    console.print(
        f"{policy.name}{asked}. mass: share of attention on the evidence. predicted: by the odds form, from "
        "the full cache's mass and the fractions kept. Intervals: 95 % over problems.",
        highlight=False,
        markup=False,
    )


def attention_row(setting: Setting, head: Dilution) -> tuple[str, ...]:
    """One line of the first table."""
    masses = (head.mass_full, head.mass_evicted, head.mass_predicted)
    return (
        f"{setting.dial:g}",
        head.head,
        *(f"{each.value:.4f}" for each in masses),
        f"{head.bound:.3f}",
        f"{head.gap:+.2f}",
        f"{head.rivals:.4f}",
        f"{head.rho_useful:.3f}",
        f"{head.rho_distracting:.3f}",
        f"{100 * head.preferential:.0f} %",
    )


def percent(mean: Mean, sign: str = "") -> str:
    """A share in percent with its interval."""
    text = f"{100 * mean.value:{sign}.2f}"
    if mean.interval is None:
        return text
    low, high = (100 * each for each in mean.interval)
    return f"{text} [{low:{sign}.2f}, {high:{sign}.2f}]"
