"""`kvkeep plan`: how many sequences fit into a memory, full cache beside budgets, from the config alone."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from kvkeep.cli import options as opt
from kvkeep.cli.tables import show_table
from kvkeep.core.budget import format_bytes, parse_bytes
from kvkeep.core.errors import BudgetError, ConfigError, UnsupportedError
from kvkeep.core.precision import widths

if TYPE_CHECKING:
    from kvkeep.core.precision import Precision
    from kvkeep.core.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What fits with one cache.

    Parameters
    ----------
    cache
        ``"full"`` or ``"budget N"``.
    entries
        Entries per KV head and layer at the fullest moment: the context, or budget and buffer.
    bytes_per_row
        Keys and values of one sequence.
    rows
        Sequences that fit beside the weights.
    tokens
        Tokens of context that these sequences have in view or have seen: rows times context.
    kv_bytes
        Keys and values of all of them.
    """

    cache: str
    entries: int
    bytes_per_row: int
    rows: int
    tokens: int
    kv_bytes: int


def plan(
    model: opt.Model = "demo",
    memory: Annotated[str, typer.Option(help="Memory of the device, for example 24GiB.")] = "24GiB",
    context: Annotated[int, typer.Option(help="Tokens per sequence, prompt and answer together.")] = 32768,
    budgets: Annotated[str, typer.Option(help="Budgets to compare, in entries.")] = "512,1024,2048,4096",
    buffer: Annotated[int, typer.Option(help="Newest entries held above the budget.")] = 64,
    dtype: opt.Dtype = "bfloat16",
    kv_bits: opt.KvBits = None,
    kv_key_bits: opt.KvKeyBits = None,
    protect: opt.ProtectRule = None,
    kv_group: opt.KvGroup = None,
    kv_reserve: opt.KvReserve = None,
    kv_sinks: opt.KvSinks = None,
    kv_recent: opt.KvRecent = None,
    as_json: opt.AsJson = False,
) -> None:
    """Show what fits: rows, tokens and bytes, full cache beside budgets. Reads only the config."""
    available, amounts = parse_bytes(memory), _amounts(budgets)
    for name, value in (("context", context), ("buffer", buffer)):
        if value < 1:
            raise ConfigError(f"--{name} {value} is below 1 token.")

    precision = opt.make_precision(
        kv_bits, protect, kv_group, kv_reserve, kv_sinks, kv_recent, key_bits=kv_key_bits
    )
    from kvkeep.cli import loading, report

    loading.one_of("dtype", dtype, loading.DTYPES)
    config = loading.load_config(loading.resolve(model, report.note))
    size, spec, weights = measure(config, dtype)
    free = available - weights
    fits = [fit("full", context, spec, size, context, free)]
    settled = [precision and precision.settled(buffer=buffer, budget=amount) for amount in (None, *amounts)]
    if precision is not None:
        reasons = precision.check(spec.head_dim, spec.value_dim)
        if reasons:
            raise UnsupportedError(f"storing entries in {widths(precision.as_dict())}", reasons)
        fits.append(fit("full, few bits", context, spec, size, context, free, settled[0], buffer))
    for amount, each in zip(amounts, settled[1:], strict=True):
        held = min(context, amount + buffer)
        fits.append(fit(f"budget {amount}", held, spec, size, context, free, each, buffer))
    notes = _notes(spec, context, weights, available)
    if precision is not None:
        notes.append(
            "Few bits save what is stored: a step first reads the entries of a layer back in full precision."
        )
    if as_json:
        facts = {"model": model, "memory": available, "dtype": dtype, "context": context, "weights": weights}
        facts["precision"] = None if precision is None else precision.as_dict()
        typer.echo(json.dumps(facts | {"fits": [asdict(each) for each in fits], "notes": notes}, indent=2))
        return
    title = (
        f"{model}, {dtype}: weights {format_bytes(weights)} of {format_bytes(available)}, context {context}"
        + ("" if precision is None else f", budgets with {widths(precision.as_dict())}")
    )
    _show(title, fits, notes)


def measure(config: Any, dtype: str) -> tuple[int, ModelSpec, int]:
    """Bytes per number, the model's shape, and bytes of its weights (counted without loading them)."""
    import torch
    from transformers import AutoModelForCausalLM

    from kvkeep.engine.spec import model_spec

    spec = model_spec(config)
    kind = getattr(torch, dtype)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(spec.config, dtype=kind)
    return kind.itemsize, spec, sum(p.numel() for p in model.parameters()) * kind.itemsize


def fit(
    cache: str,
    held: int,
    spec: ModelSpec,
    size: int,
    context: int,
    free: int,
    precision: Precision | None = None,
    buffer: int = 0,
) -> Fit:
    """How many sequences fit into ``free`` bytes if each head holds ``held`` entries.

    Of those ``buffer`` and what a settled ``precision`` protects are in full precision, the rest in few bits.
    """
    per_layer = (spec.head_dim + spec.value_dim) * spec.kv_heads * size
    windows = sum(min(layer.window, context) for layer in spec.layers if layer.window) * per_layer
    full = held if precision is None else min(held, precision.full + buffer)
    few = 0 if precision is None else _few_bytes(spec, precision)
    per_row = full * spec.bytes_per_entry(size) + (held - full) * few + windows
    rows = max(0, free // per_row)
    return Fit(
        cache=cache,
        entries=held,
        bytes_per_row=per_row,
        rows=rows,
        tokens=rows * context,
        kv_bytes=rows * per_row,
    )


def _few_bytes(spec: ModelSpec, precision: Precision) -> int:
    """Bytes of one entry in few bits, in all managed layers and KV heads of one sequence."""
    from kvkeep.kernels.few_bits import row_bytes

    dims = {"keys": spec.head_dim, "values": spec.value_dim}
    per_head = sum(row_bytes(dim, precision.width(kind), precision.group) for kind, dim in dims.items())
    return per_head * spec.kv_heads * len(spec.managed)


def _amounts(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not part.isdecimal() or int(part) < 1:
            raise BudgetError(
                f"cannot read {part!r} in --budgets {text!r}: write counts of at least 1 entry, for example "
                "512,1024."
            )
    return [int(part) for part in parts]


def _notes(spec: ModelSpec, context: int, weights: int, available: int) -> list[str]:
    notes = ["Keys, values and weights only: activations and the library need room as well."]
    if weights > available:
        notes.append(f"The weights alone need {format_bytes(weights)}: nothing fits.")
    if spec.max_positions is not None and context > spec.max_positions:
        notes.append(
            f"The model was made for {spec.max_positions} positions, fewer than the context asked for."
        )
    others = sum(layer.kind == "recurrent" for layer in spec.layers)
    if others:
        notes.append(f"The states of {others} recurrent layers are not counted.")
    return notes


def _show(title: str, fits: list[Fit], notes: list[str]) -> None:
    names = ("cache", "entries", "bytes per row", "rows", "tokens", "KV bytes", "× full")
    full = fits[0].rows
    rows = [
        (
            each.cache,
            str(each.entries),
            format_bytes(each.bytes_per_row),
            str(each.rows),
            str(each.tokens),
            format_bytes(each.kv_bytes),
            f"{each.rows / full:.1f}" if full else "–",
        )
        for each in fits
    ]
    console = Console()
    show_table(names, rows, texts={"cache": 12}, title=title, console=console)
    for line in notes:
        console.print(line, style="dim", highlight=False)
