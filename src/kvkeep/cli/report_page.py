"""`kvkeep report`: a page and a Markdown file from runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvkeep.cli import options as opt
from kvkeep.core.errors import ConfigError

if TYPE_CHECKING:
    from kvkeep.evaluation.records import Run
    from kvkeep.evaluation.study import Family


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders that `kvkeep eval --out` wrote.")],
    out: Annotated[
        Path, typer.Option(help="The page; a Markdown file of the same name stands beside it.")
    ] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Heading.")] = "kvkeep report",
    baseline: Annotated[
        Path | None, typer.Option(help="Add a decision table: every other run against this one.")
    ] = None,
    prereg: Annotated[
        Path | None, typer.Option(help="Add the decision of this frozen study, tested on its runs.")
    ] = None,
    allow: Annotated[
        list[str] | None, typer.Option(help="As for `kvkeep compare`: a difference to accept.")
    ] = None,
    as_json: opt.AsJson = False,
) -> None:
    """Write a page with figures, tables and decisions, for phone and desktop, and the same as Markdown."""
    if baseline is not None and prereg is not None:
        raise ConfigError("--baseline explores, --prereg confirms: give one of them.")
    from kvkeep.core.files import atomic_path
    from kvkeep.evaluation.report.page import make_report
    from kvkeep.evaluation.runlog import read_run

    found = [read_run(place) for place in runs]
    reference = None
    if baseline is not None:
        reference = read_run(baseline)
        if baseline.resolve() not in [place.resolve() for place in runs]:
            found.insert(0, reference)
    made = make_report(found, title=title, family=decision(found, reference, prereg, allow or []))
    beside = out.with_suffix(".md")
    for path, text in ((out, made.html()), (beside, made.markdown())):
        with atomic_path(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    if as_json:
        summaries = [each.as_dict() for section in made.sections for each in section.summaries]
        family = None if made.family is None else made.family.as_dict()
        typer.echo(
            json.dumps({"page": str(out), "markdown": str(beside), "runs": summaries, "decision": family})
        )
        return
    typer.echo(f"wrote {out} and {beside}: {len(found)} runs")


def decision(found: list[Run], baseline: Run | None, prereg: Path | None, allow: list[str]) -> Family | None:
    """The comparisons that were asked for."""
    from kvkeep.evaluation import study

    if prereg is not None:
        from kvkeep.evaluation.seal import load_frozen

        return study.confirm(load_frozen(prereg), found)
    if baseline is None:
        return None
    others = [run for run in found if run != baseline]
    return study.explore(baseline, others, allow=allow)
