"""`kvkeep study`: the plan of a study, checked and sealed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kvkeep.cli.options import AsJson

Study = Annotated[Path, typer.Argument(help="A pre-registration, YAML.")]

app = typer.Typer(help="Write down and seal what will be tested.", no_args_is_help=True)


@app.command("check")
def check_study(path: Study, as_json: AsJson = False) -> None:
    """Read a pre-registration, say whether it is complete and whether it is frozen."""
    from kvkeep.evaluation.preregistration import load, load_frozen, lock_path

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
    from kvkeep.evaluation.preregistration import freeze, lock_path

    sealed = freeze(path)
    typer.echo(f"frozen: {sealed}, in {lock_path(path)}")
