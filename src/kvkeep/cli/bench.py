"""`kvkeep bench`: speed and memory of policies beside full caches."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer

app = typer.Typer(help="Measure speed and memory.", no_args_is_help=True)

ModelOption = Annotated[
    str | None, typer.Option("--model", help="Folder or hub id of a causal language model.")
]
ShapeOption = Annotated[
    str | None,
    typer.Option(help="Random weights of this shape instead: qwen3-14b, qwen3-4b, smollm2-135m, tiny."),
]
BudgetOption = Annotated[int, typer.Option(help="Entries kept per KV head and layer.")]
BufferOption = Annotated[
    int | None, typer.Option(help="Newest entries always kept, and the period of evictions [policy's own].")
]
DtypeOption = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
DeviceOption = Annotated[str, typer.Option(help="cpu, cuda, cuda:1 …")]
ThreadsOption = Annotated[int | None, typer.Option(help="CPU threads of torch [torch's own choice].")]
SeedOption = Annotated[int, typer.Option(help="Of prompt, synthetic entries and policies.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
OutOption = Annotated[
    list[Path] | None,
    typer.Option(help="Also write the result to this file: .json, or a Markdown table. Repeatable."),
]


class Report(Protocol):
    """What can be printed here."""

    def as_dict(self) -> dict[str, Any]: ...
    def markdown(self) -> str: ...
    def title(self) -> str: ...
    def header(self) -> list[str]: ...
    def rows(self) -> list[list[str]]: ...
    def footer(self) -> list[str]: ...


@app.command()
def decode(
    model: ModelOption = None,
    shape: ShapeOption = None,
    policies: Annotated[
        str, typer.Option(help="Comma-separated policies (kvkeep policies lists them), or 'all'.")
    ] = "full,vase-attnv,vase-dkv",
    batch: Annotated[int, typer.Option(help="Sequences.")] = 8,
    context: Annotated[int, typer.Option(help="Tokens seen before the first timed step.")] = 8192,
    prompt: Annotated[
        int, typer.Option(help="Tokens of the context that are read for real; the rest is synthetic.")
    ] = 64,
    budget: BudgetOption = 512,
    buffer: BufferOption = None,
    stock: Annotated[
        str,
        typer.Option(
            help="Full-cache baselines beside DynamicCache: dynamic, static, static-compiled, or all. "
            "Comma-separated. Compiling takes a minute or more on a CPU."
        ),
    ] = "static",
    steps: Annotated[
        int, typer.Option(help="Steps per round of a policy; rounded up to whole eviction periods.")
    ] = 64,
    full_steps: Annotated[int, typer.Option(help="Steps per round of the full-cache baselines.")] = 8,
    rounds: Annotated[int, typer.Option(help="Rounds that count, after one warm-up round.")] = 5,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "cpu",
    threads: ThreadsOption = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
    out: OutOption = None,
) -> None:
    """Decode speed and memory: full caches and policies, alternating in one process.

    On a CPU set OMP_WAIT_POLICY=PASSIVE when its cores are shared. The protocol of the VaSE paper on a GPU:
    --shape qwen3-14b --dtype bfloat16 --device cuda --batch 16 --prompt 256 --context 256
    --steps 16384 --full-steps 16384 --budget 2048 --rounds 5.
    """
    from kvkeep.benchmarking.arms import STOCK
    from kvkeep.benchmarking.decode import DecodeSettings, run_decode

    settings = DecodeSettings(
        batch=batch,
        context=context,
        prompt=prompt,
        steps=steps,
        full_steps=full_steps,
        rounds=rounds,
        stock=STOCK if stock == "all" else tuple(_names(stock)),
        seed=seed,
    )
    chosen = _policies(policies, budget, buffer)
    loaded = _load(model, shape, dtype, device, threads, seed)
    with _progress() as progress:
        report = run_decode(loaded, chosen, settings, progress=progress)
    _show(report, as_json, out)


@app.command()
def flat(
    model: ModelOption = None,
    shape: ShapeOption = None,
    policy: Annotated[str, typer.Option(help="One policy (kvkeep policies lists them).")] = "vase-attnv",
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    prompt: Annotated[int, typer.Option(help="Tokens read before decoding begins.")] = 64,
    tokens: Annotated[int, typer.Option(help="Tokens to decode, all for real.")] = 32768,
    window: Annotated[int, typer.Option(help="Tokens that are averaged.")] = 1024,
    budget: BudgetOption = 512,
    buffer: BufferOption = None,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "cpu",
    threads: ThreadsOption = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
    out: OutOption = None,
) -> None:
    """Time per token in windows of one long run: flat, if memory and work are bounded."""
    from kvkeep.benchmarking.flat import FlatSettings, run_flat

    settings = FlatSettings(batch=batch, prompt=prompt, tokens=tokens, window=window, seed=seed)
    chosen = _policies(policy, budget, buffer)[0]
    loaded = _load(model, shape, dtype, device, threads, seed)
    with _progress() as progress:
        report = run_flat(loaded, chosen, settings, progress=progress)
    _show(report, as_json, out)


def _names(text: str) -> list[str]:
    """Cut at commas outside brackets: ``vase-attnv(reserve=0,pool=1),snapkv``."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def _policies(text: str, budget: int, buffer: int | None) -> list[Any]:
    from kvkeep import available_policies, policy
    from kvkeep.core.errors import ConfigError

    names = list(available_policies()) if text == "all" else _names(text)
    if not names:
        raise ConfigError("no policy was named: give --policies vase-attnv, or --policies all.")
    options = {"budget": budget} | ({} if buffer is None else {"buffer": buffer})
    return [policy(name, **options) for name in names]


def _load(
    model: str | None, shape: str | None, dtype: str, device: str, threads: int | None, seed: int
) -> Any:
    import torch

    from kvkeep.benchmarking.models import load_model

    if threads is not None:
        torch.set_num_threads(threads)
    return load_model(path=model, shape=shape, dtype=dtype, device=device, seed=seed)


@contextmanager
def _progress() -> Iterator[Callable[[int, int, str], None]]:
    """A bar on stderr with rate and time left."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    # A bar that redraws itself in a thread would take time from what is measured.
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False) as bar:
        task = bar.add_task("filling caches", total=None)

        def show(done: int, total: int, label: str) -> None:
            bar.update(task, completed=done, total=total, description=label)
            if done % 8 == 0 or done == total:
                bar.refresh()

        yield show


def _show(report: Report, as_json: bool, out: list[Path] | None) -> None:
    from rich.console import Console
    from rich.table import Table

    text = json.dumps(report.as_dict(), indent=2)
    for path in out or []:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n" if path.suffix == ".json" else report.markdown())
    if as_json:
        typer.echo(text)
        return
    console = Console()
    table = Table(title=report.title())
    for place, name in enumerate(report.header()):
        table.add_column(name, justify="left" if place == 0 else "right")
    for row in report.rows():
        table.add_row(*row)
    console.print(table)
    for line in report.footer():
        console.print(line, style="dim", highlight=False)
