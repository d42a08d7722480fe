"""`kvkeep study`: the plan of a study, checked and sealed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kvkeep.cli.design_space import design_space
from kvkeep.cli.options import AsJson
from kvkeep.core.errors import ConfigError

Study = Annotated[Path, typer.Argument(help="A pre-registration, YAML.")]

app = typer.Typer(help="Write down and seal what will be tested; study mechanisms.", no_args_is_help=True)


app.command("design-space")(design_space)


@app.command("check")
def check_study(path: Study, as_json: AsJson = False) -> None:
    """Read a pre-registration, say whether it is complete and whether it is frozen."""
    from kvkeep.evaluation.seal import load, load_frozen, lock_path

    study = load(path)
    frozen = lock_path(path).exists()
    if frozen:
        load_frozen(path)
    facts = {
        "study": study.study,
        "sha256": study.sha256,
        "frozen": frozen,
        "cells": [cell.name for cell in study.cells],
        "deviations": list(study.deviations),
    }
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    typer.echo(f"{study.study}: {len(study.cells)} cells ({', '.join(cell.name for cell in study.cells)})")
    typer.echo(f"{'frozen' if frozen else 'not frozen yet'}, content {study.sha256}")


@app.command("freeze")
def freeze_study(path: Study) -> None:
    """Seal a pre-registration: from now on only its deviations may grow."""
    from kvkeep.evaluation.seal import freeze, lock_path

    sealed = freeze(path)
    typer.echo(f"frozen: {sealed}, in {lock_path(path)}")


@app.command("draft")
def draft_study(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Dev runs: baseline and challenger of the first cell, of the second …"),
    ],
    out: Annotated[Path, typer.Option(help="The YAML file to write.")],
    question: Annotated[str, typer.Option(help="What is asked.")],
    hypothesis: Annotated[str, typer.Option(help="What is expected; it may turn out wrong.")],
    name: Annotated[str | None, typer.Option(help="Of the study [the name of the file].")] = None,
    on: Annotated[
        str | None,
        typer.Option(help="Confirm on the held-out problems of this task [the task of the runs]."),
    ] = None,
    data: Annotated[str | None, typer.Option(help="Data of the task of --on.")] = None,
    limit: Annotated[
        int | None, typer.Option(help="At most so many held-out problems, a fair sample.")
    ] = None,
    correction: Annotated[str, typer.Option(help="holm, bonferroni or none.")] = "holm",
    seed: Annotated[int, typer.Option(help="Of the resamples.")] = 0,
) -> None:
    """Write a study that repeats dev runs on held-out problems: read it, change it, then freeze it."""
    from kvkeep.core.files import atomic_path
    from kvkeep.evaluation.draft import draft, held_out
    from kvkeep.evaluation.extras import need
    from kvkeep.evaluation.runlog import read_run
    from kvkeep.evaluation.seal import load
    from kvkeep.evaluation.tasks.registry import make_task

    if len(runs) % 2:
        raise ConfigError(f"{len(runs)} runs are no pairs: give baseline and challenger of each cell.")
    if out.exists():
        raise ConfigError(f"{out} exists: choose another --out.")
    found = [read_run(place) for place in runs]
    plans = {}
    for run in found:
        if run.header.task not in plans:
            request = run.header.extra.get("request", {})
            source = (request.get("task", run.header.task), request.get("data")) if on is None else (on, data)
            with make_task(source[0], data=source[1]) as task:
                plans[run.header.task] = held_out(task, limit)
    content = draft(
        name or out.stem,
        question,
        list(zip(found[::2], found[1::2], strict=True)),
        plans,
        hypothesis=hypothesis,
        seed=seed,
        correction=correction,
    )
    yaml = need("yaml", extra="eval", purpose="a pre-registration")
    with atomic_path(out) as temporary:
        temporary.write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True), encoding="utf-8")
    study = load(out)
    typer.echo(f"{out}: {len(study.cells)} cells. Read it, change what is not meant so, then:")
    typer.echo(f"kvkeep study freeze {out}")
