"""`kvkeep gates`: train gates, and look at them."""

from __future__ import annotations

import typer

from kvkeep.cli import gates_blocks, gates_inspect, gates_train

app = typer.Typer(help="Train gates, and look at them.", no_args_is_help=True)
app.command("train")(gates_train.train)
app.command("train-blocks")(gates_blocks.train_blocks)
app.command("inspect")(gates_inspect.inspect)


@app.callback()
def root() -> None:
    """Train gates, and look at them."""
