"""`kvkeep analyze values`: how large values are, where, and whether range, norm and attention agree."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvkeep.cli import analyze_texts as read
from kvkeep.cli import options as opt
from kvkeep.core.errors import ConfigError


def values(
    model: opt.Model = "demo",
    text: read.TextFile = None,
    run: read.RunFolder = None,
    samples: read.Samples = 4,
    limit: read.Limit = 32768,
    portion: read.PortionSize = 8192,
    reserve: Annotated[
        int | None,
        typer.Option(help="Entries in each top set [a sixteenth of the text: VaSE's at a quarter kept]."),
    ] = None,
    window: Annotated[int, typer.Option(help="Last queries whose attention ranks entries.")] = 64,
    gates: opt.Gates = None,
    page: read.Page = None,
    chunk: Annotated[int, typer.Option(help="Tokens per forward.")] = 512,
    threads: opt.Threads = None,
    dtype: opt.Dtype = "float32",
    attention: opt.Attention = "sdpa",
    device: opt.Device = "auto",
    as_json: opt.AsJson = False,
) -> None:
    """Show how value range, variance and norm are spread over layers, heads and the text, sinks apart.

    Top sets by range, variance, norm, attention of the last queries and, with --gates, retention are held
    against each other: do they name the same entries?
    """
    read.check(text, run, page, samples=samples, limit=limit, portion=portion, window=window, chunk=chunk)
    if reserve is not None and reserve < 1:
        raise ConfigError(f"--reserve {reserve} leaves nothing to compare: give at least 1.")
    from kvkeep.analysis.findings import values_findings
    from kvkeep.analysis.reading import read_portions
    from kvkeep.cli import loading, report
    from kvkeep.cli.calibrate import bar

    source = loading.resolve(model, report.note)
    with report.waiting(f"loading {model}"):
        loaded = loading.load_model(source, dtype=dtype, attention=attention, device=device, threads=threads)
    trained = loading.load_gates(gates, loaded, retention=True)
    texts, what = read.read_texts(model, loaded, text, run, samples=samples, limit=limit)
    with bar() as progress:
        portions = list(
            read_portions(
                loaded.model,
                texts,
                portion=portion,
                chunk=chunk,
                window=window,
                gates=trained,
                progress=progress,
            )
        )
    facts: dict[str, Any] = {
        **read.reading_facts(model, loaded, what, texts),
        "window": window,
        "gates_sha256": None if trained is None else trained.sha256,
        **values_findings(portions, reserve),
    }
    if page is not None:
        from kvkeep.evaluation.report.values_page import values_page

        read.write_page(page, lambda: values_page(facts))
    if as_json:
        typer.echo(report.as_json(facts))
        return
    show(facts)


def show(facts: dict[str, Any]) -> None:
    """The tables of the page."""
    from kvkeep.evaluation.report.values_tables import overlap_table, spread_table, stretch_table

    tables = [
        ("Spread of the magnitudes by layer, sinks apart", spread_table(facts)),
        ("Along the text, beside the middle of each head", stretch_table(facts)),
        ("Do they name the same entries?", overlap_table(facts)),
    ]
    read.show_tables(facts, tables)
