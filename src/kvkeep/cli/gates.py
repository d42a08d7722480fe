"""`kvkeep gates`: look at retention gates."""

from __future__ import annotations

import typer

from kvkeep.cli import gates_inspect

app = typer.Typer(help="Look at retention gates.", no_args_is_help=True)
app.command("inspect")(gates_inspect.inspect)


@app.callback()
def root() -> None:
    """Look at retention gates."""
