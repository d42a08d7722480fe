"""What the commands print about runs: text as it comes, progress, a table, JSON. Notes go to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.rule import Rule

from kvkeep import __version__
from kvkeep.cli.tables import show_table
from kvkeep.core.budget import format_bytes

if TYPE_CHECKING:
    from kvkeep.cli.answering import Run
    from kvkeep.core.policy import Policy


def note(text: str) -> None:
    """One line for the reader, beside the output."""
    typer.echo(text, err=True)


def write(text: str) -> None:
    """A piece of an answer, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def heading(text: str) -> None:
    """A line that opens a part of the output."""
    Console().print(Rule(text, align="left", style="dim"))


def aside(text: str) -> None:
    """A remark under a table."""
    Console().print(text, style="dim", highlight=False)


@contextmanager
def waiting(what: str) -> Iterator[Callable[[], None]]:
    """A sign of life on a terminal; calling what it gives ends it early."""
    with Console(stderr=True).status(f"{what} …") as status:
        yield status.stop


@contextmanager
def steps(total: int, *, show: bool) -> Iterator[Callable[[], None]]:
    """A bar of steps with rate and time left, on stderr."""
    if not show or not sys.stderr.isatty():
        yield lambda: None
        return
    columns = (TextColumn("writing"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)


def show_texts(run: Run) -> None:
    """The answers of a batch, one after another."""
    for number, text in enumerate(run.texts, start=1):
        heading(f"{number} of {len(run.texts)}")
        typer.echo(text)


def show_runs(runs: Sequence[Run]) -> None:
    """One row per run: what was asked for, and what was measured."""
    names = (
        "policy",
        "tokens",
        "asked for",
        "mean",
        "peak",
        "read",
        "KV bytes",
        "at peak",
        "tokens/s",
        "evictions",
    )
    rows = []
    for run in runs:
        trace, speed = run.trace, run.tokens_per_second
        rows.append(
            (
                trace.policy,
                f"{sum(run.prompt_tokens)}+{sum(run.new_tokens)}",
                trace.requested,
                f"{trace.mean_entries:.1f}",
                str(trace.peak_entries),
                f"{trace.mean_read:.1f}",
                format_bytes(trace.kv_bytes),
                format_bytes(trace.peak_kv_bytes),
                "–" if speed is None else f"{speed:.1f}",
                str(trace.evictions),
            )
        )
    show_table(names, rows, texts={"policy": 10, "asked for": 9})
    lines = [
        "tokens: prompt + new. mean, peak: measured entries per KV head and layer, mean while writing.",
    ]
    if any(run.trace.mean_read < run.trace.mean_entries for run in runs):
        lines.append(
            "read: mean of the entries that a step reads, each once for all query heads of a KV head."
        )
    lines += [f"{run.trace.policy}: 0 evicted." for run in runs if not run.trace.evictions]
    for trace in (run.trace for run in runs if run.trace.precision):
        none = " (what is protected and new is all there is)" if not trace.few_bits_entries else ""
        lines.append(
            f"{trace.policy}: {trace.few_bits_entries} entries per head in few bits{none}; {trace.precision}."
        )
    lines += [
        f"{run.trace.policy}: {run.beyond} tokens lie beyond the model's positions: do not trust them."
        for run in runs
        if run.beyond
    ]
    for line in lines:
        aside(line)


def as_json(facts: Any) -> str:
    """JSON text; budgets and policies inside policies are written out."""

    def plain(value: Any) -> Any:
        options = getattr(value, "options", None)
        return str(value) if options is None else {"name": value.name, **options()}

    return json.dumps(facts, indent=2, default=plain)


def as_dict(model: str, policy: Policy, seed: int, run: Run) -> dict[str, Any]:
    """Everything about a run, JSON-ready."""
    return {
        "kvkeep": __version__,
        "model": model,
        "policy": {"name": policy.name, "options": policy.options()},
        "seed": seed,
        "answers": [
            {"text": text, "prompt_tokens": read, "new_tokens": new}
            for text, read, new in zip(run.texts, run.prompt_tokens, run.new_tokens, strict=True)
        ],
        "read_seconds": round(run.read_seconds, 3),
        "write_seconds": round(run.write_seconds, 3),
        "tokens_per_second": None if run.tokens_per_second is None else round(run.tokens_per_second, 2),
        "tokens_beyond_positions": run.beyond,
        "trace": run.trace.as_dict(),
    }
