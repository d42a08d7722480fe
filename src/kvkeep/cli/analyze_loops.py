"""`kvkeep analyze loops`: which texts go round in circles, and what was evicted before they did."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kvkeep.cli import options as opt
from kvkeep.core.errors import ConfigError, DataFileError


def loops(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Folders that `kvkeep eval --out` wrote; with --log-evictions they tell what went before."
        ),
    ],
    beside: Annotated[
        str | None, typer.Option(help="Name of the run that the others are held against [the first].")
    ] = None,
    before: Annotated[int, typer.Option(help="Evictions that are 'just before' a loop.")] = 2,
    page: Annotated[
        Path | None, typer.Option(help="Write tables and figures as one HTML file that needs nothing else.")
    ] = None,
    as_json: opt.AsJson = False,
) -> None:
    """Show loops and failure classes of runs, when loops began, and what evictions took just before.

    A model is watched while it writes: `kvkeep eval --log-evictions` for each policy, then this.
    """
    if before < 1:
        raise ConfigError(f"--before {before} leaves no eviction to look at: give at least 1.")
    if page is not None and (page.is_dir() or not page.parent.is_dir()):
        raise DataFileError(f"cannot write {page}: give a file in a folder that exists.")
    from kvkeep.cli import report
    from kvkeep.evaluation.loops_summary import loops_findings
    from kvkeep.evaluation.runlog import read_run

    found = {}
    for place in runs:
        run = read_run(place)
        name = run.header.run if run.header.run not in found else str(place)
        found[name] = run
    facts: dict[str, Any] = {
        "command": ["kvkeep", *sys.argv[1:]],
        **loops_findings(found, beside=beside, before=before),
    }
    if page is not None:
        from kvkeep.core.files import atomic_path
        from kvkeep.evaluation.report.loops_page import loops_page

        with atomic_path(page) as temporary:
            temporary.write_text(loops_page(facts), encoding="utf-8")
        report.note(f"wrote {page}")
    if as_json:
        typer.echo(report.as_json(facts))
        return
    show(facts)


def show(facts: dict[str, Any]) -> None:
    """The tables of the page that fit a terminal."""
    from kvkeep.cli.tables import show_table
    from kvkeep.evaluation.report.loops_tables import before_table, class_table

    for title, table in (
        ("Loops and failure classes", class_table(facts)),
        ("What went just before a loop began", before_table(facts)),
    ):
        if table.rows:
            show_table(table.columns, table.rows, texts={table.columns[0]: 10}, title=title)
            typer.echo(f"{table.note}\n")
    silent = [name for name, arm in facts["arms"].items() if arm["evicted"] is None]
    if silent:
        typer.echo(f"No evictions were noted in {', '.join(silent)}: kvkeep eval --log-evictions notes them.")
    for name, arm in facts["arms"].items():
        if arm["reasons"]:
            typer.echo(f"{name} is not compared with {facts['beside']}: {'; '.join(arm['reasons'])}.")
