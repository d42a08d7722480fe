"""`kvkeep policies`: what there is, and what each policy says about itself."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from kvkeep.cli.options import AsJson
from kvkeep.cli.tables import show_table

if TYPE_CHECKING:
    from kvkeep.core.policy import Policy

app = typer.Typer(help="List the policies, or show one.", invoke_without_command=True)


@app.callback()
def listing(context: typer.Context, as_json: AsJson = False) -> None:
    """List the policies: what each keeps, when it evicts, what it needs."""
    if context.invoked_subcommand is not None:
        return
    from kvkeep import available_policies
    from kvkeep.policies.compose import PART_GROUPS

    rows = [describe(kind) for kind in available_policies().values()]
    if as_json:
        typer.echo(json.dumps(rows, indent=2, default=str))
        return
    names = ("policy", "what it does", "evicts", "scope", "needs", "random")
    cells = [
        (
            row["name"],
            row["summary"],
            row["trigger"],
            row["scope"],
            ", ".join(row["needs"]) or "–",
            "yes" if row["random"] else "no",
        )
        for row in rows
    ]
    console = Console()
    texts = {"policy": 18, "what it does": 20, "evicts": 8, "scope": 5, "needs": 11, "random": 6}
    show_table(names, cells, texts=texts, console=console)
    console.print("`kvkeep policies show NAME` says more. Parts combine: 'triattention + sample + reserve'.")
    for meaning, parts in PART_GROUPS.items():
        console.print(f"{meaning}: {_parts(parts)}.", markup=False, soft_wrap=True)


def _parts(parts: Mapping[str, Sequence[str]]) -> str:
    """Parts as one would write them, ``+ name(option, option)``."""
    return ", ".join(f"+ {name}" + (f"({', '.join(own)})" if own else "") for name, own in parts.items())


@app.command()
def show(name: Annotated[str, typer.Argument(help="A policy's name.")], as_json: AsJson = False) -> None:
    """Print a policy's own words: idea, parameters, source, deviations; and its defaults."""
    from kvkeep import available_policies
    from kvkeep.core.errors import UnknownNameError

    known = available_policies()
    if name not in known:
        raise UnknownNameError("policy", name, known)
    kind = known[name]
    if as_json:
        facts = describe(kind) | {"defaults": defaults(kind), "documentation": inspect.getdoc(kind)}
        typer.echo(json.dumps(facts, indent=2, default=str))
        return
    typer.echo(f"{name}: {inspect.getdoc(kind)}\n\nDefaults\n--------")
    for field, value in defaults(kind).items():
        typer.echo(f"{field} = {value}")


def describe(kind: type[Policy]) -> dict[str, Any]:
    """The row of a policy, from its docstring and its traits."""
    traits = example(kind).traits
    needs = {
        f"{traits.queries} queries": traits.queries > 0,
        "attention": traits.attends,
        "moments": traits.query_moments,
        "rope": traits.rope,
        "calibration": traits.calibration,
        "gates": traits.log_retention or (traits.trained and traits.reads is None),
        "bounds": traits.reads is not None and traits.reads.bounds,
        "block gates": traits.reads is not None and traits.reads.gates,
    }
    return {
        "name": kind.name,
        "summary": (inspect.getdoc(kind) or "").split("\n\n")[0].replace("\n", " "),
        "trigger": traits.trigger.decode,
        "prefill": traits.trigger.prefill,
        "scope": traits.scope,
        "needs": [need for need, wanted in needs.items() if wanted],
        "random": traits.random,
    }


def example(kind: type[Policy]) -> Policy:
    """A policy of this kind with its defaults, at a budget that is large enough for them."""
    return kind(budget=1 << 16)


def defaults(kind: type[Policy]) -> dict[str, Any]:
    """Every setting with its default; ``required`` where there is none."""
    return {
        field.name: "required"
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        else getattr(example(kind), field.name)
        for field in dataclasses.fields(kind)
        if field.init
    }
