"""The `kvkeep` command and its sub-commands. Nothing here, or at the top of a command, imports torch."""

from __future__ import annotations

from typing import Annotated

import typer

from kvkeep import __version__
from kvkeep.cli import (
    analyze,
    bench,
    calibrate,
    compare,
    demo,
    evaluate,
    gates,
    generate,
    match,
    perplexity,
    plan,
    policies,
    power,
    report_page,
    study,
)
from kvkeep.cli.boundary import BoundaryGroup

app = typer.Typer(
    name="kvkeep",
    cls=BoundaryGroup,
    no_args_is_help=True,
    add_completion=False,
    help="Run reasoning language models in bounded memory.",
)
app.command("generate")(generate.generate)
app.add_typer(policies.app, name="policies")
app.command("calibrate")(calibrate.calibrate)
app.command("plan")(plan.plan)
app.command("demo")(demo.demo)
app.add_typer(bench.app, name="bench")
app.add_typer(evaluate.app, name="eval")
app.command("match")(match.match)
app.command("perplexity")(perplexity.perplexity)
app.command("compare")(compare.compare)
app.add_typer(gates.app, name="gates")
app.add_typer(study.app, name="study")
app.command("report")(report_page.report)
app.command("power")(power.power)
app.add_typer(analyze.app, name="analyze")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvkeep {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Run reasoning language models in bounded memory."""
