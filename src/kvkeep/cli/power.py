"""`kvkeep power`: how large a study must be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kvkeep.cli.compare import Alpha
from kvkeep.cli.options import AsJson
from kvkeep.core.errors import ConfigError


def power(
    difference: Annotated[
        float, typer.Argument(help="True difference of the accuracies, as a share: 0.03 is 3 points.")
    ],
    pilot: Annotated[
        list[Path] | None,
        typer.Option(help="A run with two draws or more; given twice, baseline and challenger."),
    ] = None,
    problems: Annotated[int | None, typer.Option(help="Size of a study that you have in mind.")] = None,
    draws: Annotated[int, typer.Option(help="Samples per problem and run.")] = 3,
    cells: Annotated[int, typer.Option(help="Comparisons in the family.")] = 1,
    alpha: Alpha = 0.05,
    wanted: Annotated[float, typer.Option("--power", help="Chance to find the difference.")] = 0.8,
    as_json: AsJson = False,
) -> None:
    """How many problems a difference needs, or what a study of a given size can see."""
    from kvkeep.evaluation.runlog import read_run
    from kvkeep.evaluation.statistics.power import HARD_AND_EASY, pilot_spread, problems_needed
    from kvkeep.evaluation.statistics.power import power as estimate
    from kvkeep.evaluation.statistics.problem_means import problem_means

    pilots = [read_run(place) for place in pilot or []]
    runs = [problem_means(run.samples, run.header.metric) for run in pilots]
    if len(runs) > 2:
        raise ConfigError(f"{len(runs)} pilots: give one run, or a baseline and a challenger.")
    spread = pilot_spread(*runs) if runs else HARD_AND_EASY
    needed = problems_needed(difference, draws, spread, alpha=alpha, cells=cells, wanted=wanted)
    size = needed if problems is None else problems
    result = estimate(size, draws, difference, spread, alpha=alpha, cells=cells)
    if as_json:
        facts = {"spread": vars(spread), "problems_needed": needed, "study": vars(result)}
        typer.echo(json.dumps(facts, indent=2))
        return
    typer.echo(
        f"{needed} problems x {draws} draws find {100 * difference:.1f} pp with {100 * wanted:g} % power."
    )
    typer.echo(f"{result}.")
    if not runs:
        typer.echo("Without --pilot: problems are taken as half hard, half easy, and the effect as even.")
