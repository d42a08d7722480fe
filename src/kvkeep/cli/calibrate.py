"""`kvkeep calibrate`: the query statistics that TriAttention needs, measured on any text."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvkeep.cli import options as opt
from kvkeep.core.errors import ConfigError, DataFileError

if TYPE_CHECKING:
    from kvkeep.calibration import Statistics

# Fewer tokens than this leave visible noise in the means (an estimate's error falls with the root).
_FEW_TOKENS = 1000


def calibrate(
    text: Annotated[Path, typer.Option(help="Any text file; a few thousand tokens or more.")],
    out: Annotated[Path, typer.Option(help="File to write, for example model.calibration.safetensors.")],
    model: opt.Model = "demo",
    max_tokens: Annotated[int, typer.Option(help="Tokens to read at most.")] = 32768,
    chunk: Annotated[int, typer.Option(help="Tokens per forward.")] = 1024,
    threads: opt.Threads = None,
    dtype: opt.Dtype = "float32",
    attention: opt.Attention = "sdpa",
    device: opt.Device = "auto",
    as_json: opt.AsJson = False,
) -> None:
    """Measure a model's typical queries on a text and write them to a file."""
    for flag, number in (("max-tokens", max_tokens), ("chunk", chunk)):
        if number < 1:
            raise ConfigError(f"--{flag} {number} is below 1 token.")
    words = read_text(text)
    if out.exists() and out.samefile(text):
        raise ConfigError(f"--out {out} is the text itself: give another file.")
    if out.is_dir() or not out.parent.is_dir():
        # Before the work, not after it.
        raise DataFileError(f"cannot write {out}: give a file in a folder that exists.")

    from kvkeep.calibration import capture
    from kvkeep.cli import loading, report

    source = loading.resolve(model, report.note)
    with report.waiting(f"loading {model}"):
        loaded = loading.load_model(source, dtype=dtype, attention=attention, device=device, threads=threads)
    begin = perf_counter()
    with bar() as progress:
        statistics = capture(
            loaded.model,
            words,
            tokenizer=loaded.tokenizer,
            max_tokens=max_tokens,
            chunk=chunk,
            progress=progress,
        )
    seconds = perf_counter() - begin
    statistics.save(out)
    facts = summary(statistics, out, seconds)
    if facts["tokens"] < _FEW_TOKENS:
        report.note(
            f"only {facts['tokens']} tokens were read; {_FEW_TOKENS} or more make steadier statistics."
        )
    if as_json:
        typer.echo(report.as_json(facts))
        return
    typer.echo(
        f"{out}: {facts['tokens']} tokens in {seconds:.1f} s ({facts['tokens_per_second']:.0f} tokens/s), "
        f"{facts['layers']} layers of {facts['heads']} heads.\n"
        f"Queries keep {facts['concentration']:.0%} of their length in one direction (mean of all heads; "
        f"{facts['heads_above_95']:.0%} of the heads keep more than 95%)."
    )


def read_text(path: Path) -> str:
    """Read a text file.

    Raises
    ------
    DataFileError
        If it is missing, empty, or not text.
    """
    if not path.is_file():
        raise DataFileError(f"there is no text file at {path}.")
    try:
        words = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataFileError(
            f"{path} is not UTF-8 text (byte {error.start}): give a plain text file."
        ) from error
    if not words.strip():
        raise DataFileError(f"{path} is empty: give a text of a few thousand words.")
    return words


def summary(statistics: Statistics, out: Path, seconds: float) -> dict[str, Any]:
    """What was measured, JSON-ready."""
    import torch

    heads = torch.stack([layer.head_concentration for layer in statistics.layers.values()])
    provenance = asdict(statistics.provenance)
    tokens = provenance["tokens"]
    return {
        "out": str(out),
        **provenance,
        "model_type": statistics.model_type,
        "layers": len(statistics.layers),
        "heads": statistics.heads,
        "head_dim": statistics.head_dim,
        "rope_type": statistics.rope_type,
        "concentration": round(float(heads.mean()), 4),
        "heads_above_95": round(float((heads > 0.95).float().mean()), 4),
        "seconds": round(seconds, 2),
        "tokens_per_second": round(tokens / seconds, 1),
    }


@contextmanager
def bar() -> Iterator[Callable[[int, int], None]]:
    """A progress bar with rate and time left on a terminal; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("reading"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[pace]}"))
    begin = perf_counter()
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task("", total=None, pace="")

        def progress(done: int, total: int) -> None:
            rate = done / max(perf_counter() - begin, 1e-9)
            left = timedelta(seconds=round((total - done) / rate))
            shown.update(task, completed=done, total=total, pace=f"{rate:.0f} tokens/s, {left} left")

        yield progress
