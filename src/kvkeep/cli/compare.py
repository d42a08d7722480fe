"""`kvkeep compare`: what runs on the same problems prove about each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvkeep.cli.options import AsJson
from kvkeep.core.errors import ConfigError

if TYPE_CHECKING:
    from kvkeep.evaluation.study import Family

RunPath = Annotated[list[Path], typer.Argument(help="Folders that `kvkeep eval --out` wrote.")]
Alpha = Annotated[float, typer.Option(help="Chance of an error in the whole family.")]


def compare(
    runs: RunPath,
    confirm: Annotated[
        bool, typer.Option("--confirm", help="Test the frozen study of --prereg on all its runs.")
    ] = False,
    prereg: Annotated[Path | None, typer.Option(help="The frozen pre-registration.")] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            help="A difference to accept: task, problems, prompt, sampling, draws, seeds, grader, model, "
            "engine, versions, missing, cache. Repeatable."
        ),
    ] = None,
    on: Annotated[
        str,
        typer.Option(
            "--match-on",
            help="What must be equal: mean_cache, prefill_cache, mean_memory or prefill_memory (bytes, where "
            "entries differ in width), or mean_read (for selectors).",
        ),
    ] = "mean_cache",
    tolerance: Annotated[float, typer.Option(help="How unequal it may be.")] = 0.02,
    metric: Annotated[
        str | None, typer.Option(help="accuracy, score, loop, truncated … [what the task is judged by].")
    ] = None,
    test: Annotated[
        str | None,
        typer.Option(help="bootstrap or sign-flip [sign-flip below 60 problems, bootstrap from there]."),
    ] = None,
    correction: Annotated[str, typer.Option(help="For several runs: holm, bonferroni or none.")] = "holm",
    alpha: Alpha = 0.05,
    resamples: Annotated[int, typer.Option(help="Of bootstrap and sign-flip.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Of the resamples.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Compare runs on the same problems: the first is the baseline of all others."""
    from kvkeep.evaluation.runlog import read_run

    if confirm != (prereg is not None):
        raise ConfigError(
            "a confirmation needs both: --confirm and --prereg FILE, frozen by kvkeep study freeze."
        )
    found = [read_run(place) for place in runs]
    if prereg is not None:
        from kvkeep.evaluation.seal import load_frozen
        from kvkeep.evaluation.study import confirm as confirm_study

        family = confirm_study(load_frozen(prereg), found)
    else:
        family = _explore(
            found,
            allow=allow or [],
            on=on,
            tolerance=tolerance,
            metric=metric,
            test=test,
            correction=correction,
            alpha=alpha,
            resamples=resamples,
            seed=seed,
        )
    if as_json:
        typer.echo(json.dumps(family.as_dict(), indent=2))
        return
    show(family)


def _explore(found: list[Any], **settings: Any) -> Family:
    from typing import get_args

    from kvkeep.evaluation.comparability import CompareOn
    from kvkeep.evaluation.statistics.paired import Test
    from kvkeep.evaluation.study import explore

    for flag, known, value in (
        ("--match-on", get_args(CompareOn), settings["on"]),
        ("--test", (None, *get_args(Test)), settings["test"]),
        ("--metric", (None, "accuracy", "score"), settings["metric"]),
    ):
        if value not in known:
            raise ConfigError(f"{flag} {value!r} is unknown: use {' or '.join(filter(None, known))}.")
    if len(found) < 2:
        raise ConfigError("give at least two runs: the baseline first.")
    return explore(found[0], found[1:], **settings)


def show(family: Family) -> None:
    """A table of the comparisons, the decision, and what to know before believing it."""
    from rich.console import Console

    from kvkeep.cli.tables import show_table

    names = (
        "cell",
        "baseline",
        "challenger",
        "difference",
        "interval",
        "p",
        "corrected",
        "stored",
        "memory",
        "read",
    )
    rows = []
    for cell in family.decision.cells:
        one = family.comparisons[cell.cell]
        difference, sides = one.difference, (one.baseline, one.challenger)
        low, high = difference.interval
        rows.append(
            (
                cell.cell,
                *(f"{100 * side.accuracy.estimate:.1f} %" for side in sides),
                f"{100 * difference.estimate:+.2f} pp",
                f"[{100 * low:+.2f}, {100 * high:+.2f}]",
                f"{difference.p:.4f}",
                f"{cell.adjusted_p:.4f}",
                " / ".join(f"{side.mean_cache:.1f}" for side in sides),
                " / ".join(f"{side.mean_memory:.1f}" for side in sides),
                " / ".join(f"{side.mean_read:.1f}" for side in sides),
            )
        )
    console = Console()
    show_table(names, rows, texts={"cell": 16}, console=console)
    first = next(iter(family.comparisons.values()))
    say = [
        family.decision.sentence,
        f"{first.difference.metric}, {first.baseline.accuracy.metric} over {first.difference.n} problems; "
        f"p by {first.difference.test}, {first.difference.resamples} resamples; intervals of "
        f"{100 * first.difference.level:g} % before correction.",
    ]
    for name, each in family.comparisons.items():
        say += [f"{name}: {note}." for note in each.notes]
        notable = [str(other) for other in each.beside.values() if other.p < family.decision.alpha]
        say += [f"{name}: also {other}." for other in notable]
    if family.preregistration is None:
        say.append("An exploration: it suggests, it does not confirm.")
    else:
        say.append(f"Pre-registered, {family.preregistration}.")
        say += [f"Deviation: {deviation}" for deviation in family.deviations] or ["No deviations."]
    for line in say:
        console.print(line, highlight=False, markup=False)
