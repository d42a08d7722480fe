"""`kvkeep bench`: speed and memory of policies beside full caches."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from kvkeep.cli import options as opt
from kvkeep.cli.tables import show_table
from kvkeep.core.errors import ConfigError

if TYPE_CHECKING:
    from kvkeep.core.policy import Policy

app = typer.Typer(help="Measure speed and memory.", no_args_is_help=True)

Shape = Annotated[
    str | None,
    typer.Option(
        help="Random weights of this shape instead of a model: qwen3-14b, qwen3-4b, smollm2-135m or tiny."
    ),
]
Budget = Annotated[int, typer.Option(help="Entries kept per KV head and layer.")]
Out = Annotated[
    list[Path] | None,
    typer.Option(help="Also write the result here: JSON if it ends in .json, else Markdown. Repeatable."),
]


class Report(Protocol):
    """What the commands here can show."""

    def as_dict(self) -> dict[str, Any]: ...
    def markdown(self) -> str: ...
    def title(self) -> str: ...
    def tables(self) -> list[tuple[list[str], list[list[str]]]]: ...
    def footer(self) -> list[str]: ...


@app.command()
def decode(
    model: opt.Model = "demo",
    shape: Shape = None,
    policies: Annotated[
        str, typer.Option(help="Names of `kvkeep policies`, or compositions, with commas between; or 'all'.")
    ] = "full,vase-attnv,vase-dkv",
    batch: Annotated[int, typer.Option(help="Sequences.")] = 8,
    context: Annotated[int, typer.Option(help="Tokens seen before the first timed step.")] = 8192,
    prompt: Annotated[
        int, typer.Option(help="Tokens of the context that are read for real; the rest is synthetic.")
    ] = 64,
    budget: Budget = 512,
    buffer: opt.Buffer = None,
    stock: Annotated[
        str,
        typer.Option(
            help="Full caches of transformers: dynamic (always there), static, static-compiled, with "
            "commas between; or all. Compiling takes minutes on a CPU."
        ),
    ] = "static",
    steps: Annotated[
        int, typer.Option(help="Steps per round of a policy; rounded up to whole eviction periods.")
    ] = 64,
    full_steps: Annotated[int, typer.Option(help="Steps per round of a full cache.")] = 8,
    rounds: Annotated[int, typer.Option(help="Rounds that count, after a warm-up round.")] = 5,
    dtype: opt.Dtype = "float32",
    device: opt.Device = "auto",
    threads: opt.Threads = None,
    calibration: opt.Calibration = None,
    seed: opt.Seed = 0,
    as_json: opt.AsJson = False,
    out: Out = None,
) -> None:
    """Decode speed and memory: full caches and policies, alternating in one process.

    Set OMP_WAIT_POLICY=PASSIVE where CPU cores are shared. Without --calibration, policies that need
    statistics get some of a random text, which is as good for speed.
    """
    chosen = _policies(policies, budget, buffer)
    _check_writable(out)
    from kvkeep.benchmarking.arms import STOCK
    from kvkeep.benchmarking.decode import DecodeSettings, run_decode

    settings = DecodeSettings(
        batch=batch,
        context=context,
        prompt=prompt,
        steps=steps,
        full_steps=full_steps,
        rounds=rounds,
        stock=STOCK if stock == "all" else tuple(_cut(stock)),
        seed=seed,
    )
    loaded, statistics = _load(model, shape, dtype, device, threads, seed, calibration)
    with _progress() as progress:
        report = run_decode(loaded, chosen, settings, calibration=statistics, progress=progress)
    _show(report, as_json, out)


@app.command()
def flat(
    model: opt.Model = "demo",
    shape: Shape = None,
    policy: opt.PolicyText = "vase-attnv",
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    prompt: Annotated[int, typer.Option(help="Tokens read before decoding begins.")] = 64,
    tokens: Annotated[int, typer.Option(help="Tokens to decode, all for real.")] = 32768,
    window: Annotated[int, typer.Option(help="Tokens that are averaged.")] = 1024,
    rounds: Annotated[
        int, typer.Option(help="Rounds after the run, in which a young and the old cache take turns.")
    ] = 9,
    budget: Budget = 512,
    buffer: opt.Buffer = None,
    dtype: opt.Dtype = "float32",
    device: opt.Device = "auto",
    threads: opt.Threads = None,
    calibration: opt.Calibration = None,
    seed: opt.Seed = 0,
    as_json: opt.AsJson = False,
    out: Out = None,
) -> None:
    """Time per token in windows of one long run: flat, if work and memory are bounded."""
    chosen = _policy(policy, budget, buffer, "one run decodes under one")
    _check_writable(out)
    from kvkeep.benchmarking.flat import FlatSettings, run_flat

    settings = FlatSettings(
        batch=batch, prompt=prompt, tokens=tokens, window=window, rounds=rounds, seed=seed
    )
    loaded, statistics = _load(model, shape, dtype, device, threads, seed, calibration)
    with _progress() as progress:
        report = run_flat(loaded, chosen, settings, calibration=statistics, progress=progress)
    _show(report, as_json, out)


@app.command()
def stores(
    model: opt.Model = "demo",
    shape: Shape = None,
    policy: opt.PolicyText = "vase-attnv",
    batch: Annotated[int, typer.Option(help="Sequences.")] = 8,
    prompt: Annotated[int, typer.Option(help="Tokens that are read for real; the rest is synthetic.")] = 64,
    skew: Annotated[int, typer.Option(help="Entries of one long head per layer, over the mean.")] = 16,
    rounds: Annotated[int, typer.Option(help="Rounds that count, after a warm-up round.")] = 7,
    budget: Budget = 512,
    buffer: opt.Buffer = None,
    dtype: opt.Dtype = "float32",
    device: opt.Device = "auto",
    threads: opt.Threads = None,
    calibration: opt.Calibration = None,
    seed: opt.Seed = 0,
    as_json: opt.AsJson = False,
    out: Out = None,
) -> None:
    """What pages cost: the dense and the paged store in turns, with equal and with skewed heads."""
    chosen = _policy(policy, budget, buffer, "the stores run under one")
    _check_writable(out)
    from kvkeep.benchmarking.stores import StoresSettings, run_stores

    settings = StoresSettings(batch=batch, prompt=prompt, skew=skew, rounds=rounds, seed=seed)
    loaded, statistics = _load(model, shape, dtype, device, threads, seed, calibration)
    with _progress() as progress:
        report = run_stores(loaded, chosen, settings, calibration=statistics, progress=progress)
    _show(report, as_json, out)


def _cut(text: str) -> list[str]:
    """Cut at commas outside brackets: ``vase-attnv(reserve=0, pool=1),snapkv``."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def _policies(text: str, budget: int, buffer: int | None) -> list[Policy]:
    from kvkeep import available_policies, policy

    names = list(available_policies()) if text == "all" else _cut(text)
    if not names:
        raise ConfigError("no policy was named: give --policies vase-attnv, or --policies all.")
    options = {"budget": budget} | ({} if buffer is None else {"buffer": buffer})
    found = [policy(name, **options) for name in names]
    # Gates belong to one model, and none can be given here.
    return [each for each in found if not each.traits.gated] if text == "all" else found


def _policy(text: str, budget: int, buffer: int | None, why: str) -> Policy:
    """The one policy that a text names; ``why`` there may be no more."""
    chosen = _policies(text, budget, buffer)
    if len(chosen) != 1:
        raise ConfigError(f"--policy {text!r} names {len(chosen)} policies: {why}.")
    return chosen[0]


def _load(
    model: str,
    shape: str | None,
    dtype: str,
    device: str,
    threads: int | None,
    seed: int,
    calibration: Path | None,
) -> tuple[Any, Any]:
    """The model, and the statistics in a calibration file."""
    from kvkeep.cli import loading, report

    if shape is None:
        source = loading.resolve(model, report.note)
        loaded = loading.load_model(
            source, dtype=dtype, attention="sdpa", device=device, threads=threads
        ).model
    else:
        import torch

        from kvkeep.benchmarking.models import random_model

        if threads is not None:
            torch.set_num_threads(threads)
        loaded = random_model(shape, dtype=dtype, device=loading.device_named(device), seed=seed)
    if calibration is None:
        return loaded, None
    from kvkeep.calibration import load

    return loaded, load(calibration, loaded)


@contextmanager
def _progress() -> Iterator[Callable[[int, int, str], None]]:
    """A bar on stderr with time left. It never redraws by itself: that would take time from what runs."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True) as bar:
        task = bar.add_task("filling caches", total=None)

        def show(done: int, total: int, label: str) -> None:
            bar.update(task, completed=done, total=total, description=label)
            bar.refresh()

        yield show


def _check_writable(out: list[Path] | None) -> None:
    """Fail before the measurement, not after it."""
    for path in out or []:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir() or not os.access(path.parent, os.W_OK):
            raise ConfigError(f"cannot write a result to {path}: name a file in a folder of yours.")


def _show(report: Report, as_json: bool, out: list[Path] | None) -> None:
    text = json.dumps(report.as_dict(), indent=2)
    for path in out or []:
        part = path.with_name(path.name + ".part")
        part.write_text(text + "\n" if path.suffix == ".json" else report.markdown())
        part.replace(path)
    if as_json:
        typer.echo(text)
        return
    console = Console()
    console.print(report.title(), highlight=False)
    for header, rows in report.tables():
        show_table(header, rows, texts={header[0]: 12}, console=console)
    for line in report.footer():
        console.print(line, style="dim", highlight=False)
