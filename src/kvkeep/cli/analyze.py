"""`kvkeep analyze`: look inside, where a score only says how it came out."""

from __future__ import annotations

import typer

from kvkeep.cli.analyze_dilution import dilution

app = typer.Typer(help="Look at what a policy does to attention.", no_args_is_help=True)
app.command("dilution")(dilution)


@app.callback()
def root() -> None:
    """Look at what a policy does to attention."""
