"""What `kvkeep analyze values` and `quantization` read: a text file, samples of a run, or a built-in text."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvkeep.core.errors import ConfigError, DataFileError

if TYPE_CHECKING:
    from torch import Tensor

    from kvkeep.cli.loading import Loaded
    from kvkeep.evaluation.report.tables import Table

TextFile = Annotated[
    Path | None,
    typer.Option(
        "--text", help="Any text file [a word problem; for trace-1 and its like, a solved program]."
    ),
]
RunFolder = Annotated[
    Path | None, typer.Option("--run", help="Read samples of this run, prompts and answers, instead.")
]
Samples = Annotated[int, typer.Option(help="Samples of the run, in the order of its log.")]
Limit = Annotated[int, typer.Option(help="Tokens of a text at most; the rest is not read.")]
PortionSize = Annotated[
    int, typer.Option(help="Read longer texts in portions of so many tokens, each with a cache of its own.")
]
Page = Annotated[
    Path | None, typer.Option(help="Write tables and figures as one HTML file that needs nothing else.")
]


def check(text: Path | None, run: Path | None, page: Path | None, **numbers: int) -> None:
    """Refuse what cannot be right before a model is loaded.

    Raises
    ------
    ConfigError, DataFileError
        Saying what to give instead.
    """
    if text is not None and run is not None:
        raise ConfigError("--text and --run each say what to read: give one of them.")
    for name, number in numbers.items():
        if number < 1:
            raise ConfigError(f"--{name} {number} leaves nothing to read: give at least 1.")
    if page is not None and (page.is_dir() or not page.parent.is_dir()):
        raise DataFileError(f"cannot write {page}: give a file in a folder that exists.")


def read_texts(
    model: str, loaded: Loaded, text: Path | None, run: Path | None, *, samples: int, limit: int
) -> tuple[list[Tensor], str]:
    """Token ids of each text, and what they are in words."""
    import torch

    from kvkeep.cli import report
    from kvkeep.cli.calibrate import read_text
    from kvkeep.cli.gates_inspect import sample

    if run is not None:
        words, what = run_texts(run, loaded, samples)
    elif text is not None:
        words, what = [read_text(text)], text.name
    else:
        words, what = [sample(model)], "a built-in text"
    ids = [torch.tensor(loaded.tokenizer(one, verbose=False)["input_ids"]) for one in words]
    longest = max(map(len, ids))
    if longest > limit:
        report.note(f"the longest text has {longest} tokens; the first {limit} are read (--limit).")
    return [one[:limit] for one in ids], what


def run_texts(run: Path, loaded: Loaded, samples: int) -> tuple[list[str], str]:
    """Prompts and answers of a run's first samples.

    Raises
    ------
    DataFileError
        If the run kept no texts, or its task is not to be had.
    """
    from kvkeep.cli import report
    from kvkeep.evaluation.identity import weights_sha256
    from kvkeep.evaluation.prompts import prompt_template
    from kvkeep.evaluation.runlog import read_run
    from kvkeep.evaluation.tasks.registry import make_task

    found = read_run(run)
    header, request = found.header, found.header.extra.get("request")
    if not request:
        raise DataFileError(f"run {header.run!r} does not say how its task was made.")
    if weights_sha256(loaded.model) != header.model_sha256:
        report.note(
            f"run {header.run!r} is of other weights ({header.model}): its texts are read all the same."
        )
    task = make_task(request["task"], data=request["data"])
    task.bind(lambda text: len(loaded.tokenizer(text, verbose=False)["input_ids"]))
    problems = {problem.id: problem for problem in task.all_problems()}
    template = prompt_template(header.extra["prompt"])
    texts = []
    for one in found.samples[:samples]:
        answer = one.extra.get("text")
        if answer is None or one.id not in problems:
            raise DataFileError(
                f"sample {one.key} of run {header.run!r} kept no text, or its task has no such problem."
            )
        prompt = template.render(problems[one.id].question, loaded.tokenizer)
        # A tokenizer of words joins the two by a blank of its own.
        texts.append(f"{prompt} {answer}" if header.task == "trace" else prompt + answer)
    if not texts:
        raise DataFileError(f"run {header.run!r} has no sample yet.")
    return texts, f"{len(texts)} samples of {header.run}"


def reading_facts(model: str, loaded: Loaded, what: str, texts: Sequence[Tensor]) -> dict[str, Any]:
    """What was read, by what: the head of the JSON."""
    from kvkeep.evaluation.identity import versions, weights_sha256

    return {
        "command": ["kvkeep", *sys.argv[1:]],
        "model": model,
        "model_sha256": weights_sha256(loaded.model),
        "text": what,
        "tokens": [len(each) for each in texts],
        "versions": versions(),
    }


def write_page(page: Path, made: Callable[[], str]) -> None:
    """Write a page, whole or not at all."""
    from kvkeep.cli import report
    from kvkeep.core.files import atomic_path

    with atomic_path(page) as temporary:
        temporary.write_text(made(), encoding="utf-8")
    report.note(f"wrote {page}")


def show_tables(facts: dict[str, Any], tables: Sequence[tuple[str, Table]]) -> None:
    """What was read, and the tables of the page with their notes."""
    from kvkeep.cli.tables import show_table

    typer.echo(f"{sum(facts['portions'])} tokens of {facts['text']}, {facts['model']}\n")
    for title, table in tables:
        show_table(table.columns, table.rows, texts={table.columns[0]: 10}, title=title)
        typer.echo(f"{table.note}\n")
