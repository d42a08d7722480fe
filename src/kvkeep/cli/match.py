"""`kvkeep match`: the budget at which a policy really holds as much as a reference run."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from kvkeep.cli import options as opt
from kvkeep.cli.eval_setup import BatchSize, Setup
from kvkeep.core.errors import ConfigError, DataFileError

if TYPE_CHECKING:
    from kvkeep.core.policy import Policy
    from kvkeep.core.precision import Precision
    from kvkeep.evaluation.records import Run


# A budget that every policy accepts with its defaults, to read its settings before the search.
_ROOMY = 1 << 16


def match(
    reference: Annotated[Path, typer.Argument(help="A run on dev problems, written by `kvkeep eval`.")],
    policy: opt.PolicyText,
    out: Annotated[Path, typer.Option(help="Folder for the runs that are tried.")],
    prompt_mode: Annotated[
        str | None,
        typer.Option(help="counts or kept, as for `kvkeep eval` [as in the run, else the task's own]."),
    ] = None,
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
    on: Annotated[
        str | None,
        typer.Option(
            "--match-on",
            help="mean_cache; mean_memory, bytes; prefill_cache shows how that misleads [mean_cache; "
            "mean_memory if either run has entries in few bits].",
        ),
    ] = None,
    tolerance: Annotated[
        float, typer.Option(help="Largest relative difference that counts as equal.")
    ] = 0.02,
    batch_size: BatchSize = None,
    as_json: opt.AsJson = False,
) -> None:
    """Find the budget whose measured cache equals that of a run: same task, model, problems and draws.

    Only dev problems are used and no accuracy is looked at. A second call goes on where the first stopped.
    """
    from typing import get_args

    from kvkeep.evaluation.matching import MatchOn, match_budget
    from kvkeep.evaluation.runlog import read_run
    from kvkeep.evaluation.tasks.registry import task_class

    precision = opt.make_precision(
        kv_bits, protect, kv_group, kv_reserve, kv_sinks, kv_recent, kv_prompt, kv_key_bits
    )
    if on is not None and on not in get_args(MatchOn):
        raise ConfigError(f"--match-on {on!r} is unknown: use {' or '.join(get_args(MatchOn))}.")
    target = read_run(reference)
    few = precision is not None or target.header.precision is not None
    on = on or ("mean_memory" if few else "mean_cache")
    high = max(sample.prompt_tokens + sample.tokens for sample in target.samples)
    mode = prompt_mode or target.header.budget.get("prompt") or task_class(target.header.task).prompt_mode
    amount = opt.make_budget(max(high, _ROOMY), None, None, mode)
    chosen = opt.make_policy(policy, amount, buffer=buffer, prefill=prefill, options=option)
    if not chosen.bounded:
        raise ConfigError(f"policy {chosen.name} keeps everything: there is no budget to match.")
    low = chosen.smallest_budget(high)
    found = match_budget(
        measuring(request_of(target, chosen, calibration, gates, precision), target, out, batch_size, on),
        target,
        low=low,
        high=high,
        start=guess(chosen, target, low, high) if on == "mean_cache" else None,
        on=cast("MatchOn", on),
        tolerance=tolerance,
    )
    if as_json:
        from dataclasses import asdict

        typer.echo(json.dumps({"policy": chosen.name, **asdict(found)}, indent=2))
        return
    typer.echo(f"{chosen.name}: {found}")


def guess(policy: Policy, target: Run, low: int, high: int) -> int:
    """Where to begin: the budget that should do, if answers keep their lengths."""
    from kvkeep.evaluation.expected_cache import budget_for

    lengths = [(sample.prompt_tokens, sample.steps) for sample in target.samples]
    return budget_for(policy, lengths, target.mean_cache, low=low, high=high)


def request_of(
    target: Run,
    policy: Policy,
    calibration: Path | None,
    gates: Path | None = None,
    precision: Precision | None = None,
) -> Setup:
    """What the reference ran, with another policy.

    Raises
    ------
    DataFileError
        If the log does not say.
    """
    request = target.header.extra.get("request")
    if not request:
        raise DataFileError(
            f"run {target.header.run!r} does not say how it was made: match a run of `kvkeep eval`."
        )
    named = {field.name for field in fields(Setup)}
    request = {name: value for name, value in request.items() if name in named}  # a study says more
    # JSON has no tuples; logs older than an option do not name it.
    pairs = {
        name: tuple((key, value) for key, value in request.get(name, ()))
        for name in ("overrides", "engine_options")
    }
    return Setup(
        **{**request, **pairs}, policy=policy, calibration=calibration, gates=gates, precision=precision
    )


def measuring(
    setup: Setup, target: Run, out: Path, batch_size: int | None, on: str = "mean_cache"
) -> Callable[[int], Run]:
    """Run the policy at a budget on the problems of the reference; the model is loaded once."""
    from kvkeep.cli import eval_setup, report
    from kvkeep.cli.progress import progress
    from kvkeep.evaluation.runner import Plan, evaluate
    from kvkeep.evaluation.tasks.registry import task_class

    header = target.header
    plan = Plan(
        part=header.split,
        limit=header.problems,
        draws=header.draws,
        seed=next(iter(header.seeds)),
        batch_size=task_class(header.task).batch_size if batch_size is None else batch_size,
    )
    with report.waiting(f"loading {setup.model_name}"):
        generator = eval_setup.make_generator(setup)

    def measure(entries: int) -> Any:
        amount = replace(setup.policy.amount, entries=entries)
        with progress() as show:
            run = evaluate(
                setup.make_task(),
                generator.with_policy(setup.policy.with_budget(amount)),
                out / f"budget-{entries}",
                plan,
                resume=True,
                command=sys.argv,
                on_progress=show,
                request=setup.request(),
            )
        found, wanted = getattr(run, on), getattr(target, on)
        report.note(f"budget {entries}: {on.replace('_', ' ')} {found:.1f}, reference {wanted:.1f}")
        return run

    return measure
