"""What `kvkeep gates inspect` prints: three tables and the words that explain them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import typer
from rich.console import Console

from kvkeep.cli import report
from kvkeep.cli.tables import show_table

_BAR = 20


def show(facts: Mapping[str, Any], top: int) -> None:
    """All of it, from the facts that ``--json`` prints."""
    gates, life = facts["gates"], facts["half_life"]
    shared = "shared by all layers" if gates["tied"] else "one per layer"
    _say(
        f"{gates['architecture']} gates, width {gates['width']}, last projection {shared}; "
        f"{facts['tokens']} tokens of {facts['text'] or 'a built-in text'}, {facts['model']}"
    )
    _say(
        f"Half-life over all heads: median {count(life['median'])} tokens, mean {count(life['mean'])} "
        f"(arithmetic {count(life['arithmetic'])}, of the mean log beta {count(life['of_mean'])}).\n"
    )
    _matrix(
        facts["heads"],
        "Half-life in tokens, median / mean",
        lambda head: f"{count(head['half_life']['median'])} / {count(head['half_life']['mean'])}",
    )
    report.aside("half-life: ln 2 / -ln beta. mean: geometric, since half-lives spread over powers of ten.\n")
    _matrix(
        facts["heads"],
        f"Live entries after {facts['tokens']} tokens",
        lambda head: f"{head['live'][-1]:.1f}",
    )
    _capacity(facts)
    _tokens(facts["ranked"], top)


def _say(text: str) -> None:
    """A sentence, folded to the terminal."""
    Console().print(text, highlight=False, markup=False)


def count(number: float) -> str:
    """A number in at most four characters: 0.3, 27, 1.4k, 35M."""
    for unit in ("", "k", "M", "G"):
        if number < 9.95:
            return f"{number:.1f}{unit}"
        if number < 999.5:
            return f"{number:.0f}{unit}"
        number /= 1000
    return ">1T"


def word(token: str) -> str:
    """A token between quotes, blanks and line ends visible."""
    return json.dumps(token, ensure_ascii=False)


def _matrix(heads: Sequence[Mapping[str, Any]], title: str, cell: Callable[[Mapping[str, Any]], str]) -> None:
    """One row per layer, one column per KV head."""
    rows: dict[int, list[str]] = {}
    for head in heads:
        rows.setdefault(head["layer"], [str(head["layer"])]).append(cell(head))
    columns = len(next(iter(rows.values()))) - 1
    names = ["layer", *(f"head {place}" for place in range(columns))]
    typer.echo(title)
    show_table(names, list(rows.values()), texts={})


def _capacity(facts: Mapping[str, Any]) -> None:
    """How the expected number of live entries grows with the text, beside M."""
    memory, curve = facts["memory"], facts["capacity"]
    live = list(zip(*(head["live"] for head in facts["heads"]), strict=True))
    top = max(memory or 0, *curve["live_mean"])
    names = [
        "tokens",
        "mean",
        "least",
        "most",
        *(["of M", "heads above M"] if memory else []),
        "mean live entries",
    ]
    rows = []
    for tokens, mean, heads in zip(curve["tokens"], curve["live_mean"], live, strict=True):
        beside = [f"{mean / memory:.0%}", str(sum(each > memory for each in heads))] if memory else []
        bar = "█" * round(_BAR * mean / top)
        rows.append([str(tokens), f"{mean:.1f}", f"{min(heads):.1f}", f"{max(heads):.1f}", *beside, bar])
    typer.echo("\nLive entries per head as the text grows")
    show_table(names, rows, texts={"mean live entries": 8})
    report.aside(
        "live entries: the sum of beta^age over all tokens so far, what training holds down to M"
        + (f" = {memory}.\n" if memory else "; --memory M compares.\n")
    )


def _tokens(ranked: Sequence[Mapping[str, Any]], top: int) -> None:
    """The two ends of the ranking beside each other."""
    top = min(top, len(ranked))

    def cells(token: Mapping[str, Any]) -> list[str]:
        return [
            str(token["position"]),
            word(token["token"]),
            count(token["half_life"]),
            f"{token['left']:.2f}",
        ]

    rows = [
        [*cells(long), *cells(short)]
        for long, short in zip(ranked[:top], list(reversed(ranked))[:top], strict=True)
    ]
    names = ["at", "kept longest", "half-life", "left", "at", "kept shortest", "half-life", "left"]
    show_table(names, rows, texts={"kept longest": 8, "kept shortest": 8})
    report.aside(
        "at: position in the text. half-life: mean over layers and heads. left: retention at the end of the "
        "text, mean over layers and heads."
    )
