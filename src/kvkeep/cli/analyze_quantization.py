"""`kvkeep analyze quantization`: does the range of a value tell what few bits do to it?"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvkeep.cli import analyze_texts as read
from kvkeep.cli import options as opt
from kvkeep.core.errors import ConfigError


def quantization(
    model: opt.Model = "demo",
    text: read.TextFile = None,
    run: read.RunFolder = None,
    samples: read.Samples = 4,
    limit: read.Limit = 32768,
    portion: read.PortionSize = 8192,
    scheme: Annotated[
        list[str] | None,
        typer.Option(
            help="How values are written down, as hqq-b2g32 or minmax-b4g64: kind, bits, channels a group. "
            "Repeatable [all of 2, 4 and 8 bits that fit the head]."
        ),
    ] = None,
    page: read.Page = None,
    chunk: Annotated[int, typer.Option(help="Tokens per forward.")] = 512,
    threads: opt.Threads = None,
    dtype: opt.Dtype = "float32",
    attention: opt.Attention = "sdpa",
    device: opt.Device = "auto",
    as_json: opt.AsJson = False,
) -> None:
    """Hold the error of a value in few bits against its range, layer by layer, beside the quadratic law.

    Groups lie along the head dimension; each token of each KV head is written down by itself.
    """
    read.check(text, run, page, samples=samples, limit=limit, portion=portion, chunk=chunk)
    from kvkeep.analysis.round_trip import SCHEMES, fitting
    from kvkeep.analysis.round_trip import scheme as named

    chosen = tuple(named(name) for name in dict.fromkeys(scheme or ()))
    from kvkeep.analysis.reading import read_portions
    from kvkeep.analysis.rounding import quantization_findings
    from kvkeep.cli import loading, report
    from kvkeep.cli.calibrate import bar
    from kvkeep.engine.spec import model_spec

    source = loading.resolve(model, report.note)
    with report.waiting(f"loading {model}"):
        loaded = loading.load_model(source, dtype=dtype, attention=attention, device=device, threads=threads)
    dim = model_spec(loaded.model.config).value_dim
    schemes = chosen or fitting(SCHEMES, dim)
    if not schemes:
        raise ConfigError(
            f"values of {dim} channels take no groups of 32 or 64: name a --scheme whose group divides {dim}."
        )
    texts, what = read.read_texts(model, loaded, text, run, samples=samples, limit=limit)
    with bar() as progress:
        portions = list(
            read_portions(
                loaded.model, texts, portion=portion, chunk=chunk, schemes=schemes, progress=progress
            )
        )
    facts: dict[str, Any] = {
        **read.reading_facts(model, loaded, what, texts),
        "value_dim": dim,
        **quantization_findings(portions, schemes, dim),
    }
    if page is not None:
        from kvkeep.evaluation.report.values_page import quantization_page

        read.write_page(page, lambda: quantization_page(facts))
    if as_json:
        typer.echo(report.as_json(facts))
        return
    show(facts)


def show(facts: dict[str, Any]) -> None:
    """The tables of the page."""
    from kvkeep.evaluation.report.values_tables import layer_link_table, link_table

    tables = [
        ("Range against error, mean over layers", link_table(facts)),
        ("Pearson / Spearman by layer", layer_link_table(facts)),
    ]
    read.show_tables(facts, tables)
