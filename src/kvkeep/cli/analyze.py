"""`kvkeep analyze`: look inside, where a score only says how it came out."""

from __future__ import annotations

import typer

from kvkeep.cli.analyze_dilution import dilution
from kvkeep.cli.analyze_loops import loops
from kvkeep.cli.analyze_quantization import quantization
from kvkeep.cli.analyze_values import values

app = typer.Typer(
    help="Look at attention and texts under a policy, and at values in a cache.", no_args_is_help=True
)
app.command("dilution")(dilution)
app.command("values")(values)
app.command("quantization")(quantization)
app.command("loops")(loops)


@app.callback()
def root() -> None:
    """Look at attention and texts under a policy, and at values in a cache."""
