"""`kvkeep gates inspect`: what retention gates say of a text."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvkeep.cli import gates_tables
from kvkeep.cli import options as opt
from kvkeep.core.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

# Read where no text is given, and the model is not a built-in reasoner.
_TEXT = """\
Mira planted 14 rows of beans in the spring, with 9 plants in each row. In May a late frost killed a third of
them, and the rabbits took 12 more. She sold the beans of the remaining plants at the market for 4 euros a
basket; five plants filled one basket. How much did she earn?

Let me think step by step. 14 rows of 9 plants are 14 * 9 = 126 plants. Wait, is the frost before the
rabbits? Yes: a third of 126 is 42, so 126 - 42 = 84 plants are left. The rabbits took 12 more: 84 - 12 = 72.
Five plants fill a basket, so 72 plants fill 72 / 5 = 14.4 baskets, hence 14 full baskets. At 4 euros a basket
that is 14 * 4 = 56 euros. So the answer is 56.
"""


def inspect(
    gates: Annotated[
        Path,
        typer.Option(help="Gates of the model: a file of kvkeep, or a folder as the authors publish them."),
    ],
    model: opt.Model = "demo",
    text: Annotated[
        Path | None,
        typer.Option(help="Plain text file [a word problem; for trace-1 and its like, a solved program]."),
    ] = None,
    memory: Annotated[
        int | None,
        typer.Option("--memory", help="Entries per head, M, to hold the capacity curve against."),
    ] = None,
    top: Annotated[int, typer.Option(help="Most and least kept tokens to show of each.")] = 8,
    limit: Annotated[int, typer.Option(help="Tokens of the text at most; the rest is not read.")] = 1024,
    threads: opt.Threads = None,
    dtype: opt.Dtype = "float32",
    attention: opt.Attention = "sdpa",
    device: opt.Device = "auto",
    as_json: opt.AsJson = False,
) -> None:
    """Show half-lives per layer and head, expected live entries, and the tokens kept longest and shortest."""
    for name, value in (("--memory", memory), ("--top", top), ("--limit", limit)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} {value} shows nothing: give at least 1.")
    from kvkeep.cli import loading, report
    from kvkeep.cli.calibrate import read_text

    words = None if text is None else read_text(text)
    source = loading.resolve(model, report.note)
    with report.waiting(f"loading {model}"):
        loaded = loading.load_model(source, dtype=dtype, attention=attention, device=device, threads=threads)
    trained = loading.load_gates(gates, loaded, retention=True)

    import torch

    from kvkeep.evaluation.retention_reading import read_log_betas

    words = sample(model) if words is None else words
    ids = loaded.tokenizer(words, verbose=False)["input_ids"]
    if len(ids) > limit:
        report.note(f"the text has {len(ids)} tokens; the first {limit} are read (--limit).")
    ids = ids[:limit]
    with report.waiting(f"reading {len(ids)} tokens"):
        log_beta = read_log_betas(loaded.model, trained, torch.tensor(ids, dtype=torch.int64))
    facts = {
        "model": model,
        "text": None if text is None else text.name,
        "tokens": len(ids),
        "gates": describe(trained),
        **findings(log_beta, trained.shape.layers, memory),
    }
    facts["ranked"] = [
        token | {"token": loaded.tokenizer.decode([ids[token["position"]]])} for token in facts["ranked"]
    ]
    if as_json:
        typer.echo(report.as_json(facts))
        return
    gates_tables.show(facts, top)


def sample(model: str) -> str:
    """A short text that suits a model: for a built-in reasoner a program and its execution."""
    if not model.startswith("trace-"):
        return _TEXT
    from kvkeep.testbed.trace_task import problems, size

    problem = next(problems(size("S"), "dev"))
    return " ".join([*problem.prompt, *problem.chain])


def describe(gates: Any) -> dict[str, Any]:
    """Which gates these are."""
    shape = gates.shape
    return {
        "architecture": shape.architecture,
        "tied": shape.tied,
        "scalar": shape.scalar,
        "width": shape.width,
        "sha256": gates.sha256,
        "base_weights_sha256": gates.base,
    }


def findings(log_beta: Tensor, layers: tuple[int, ...], memory: int | None) -> dict[str, Any]:
    """Everything that is shown, JSON-ready.

    Parameters
    ----------
    log_beta
        ``[layers, kv_heads, tokens]``.
    layers
        Their indices in the model.
    """
    from kvkeep.gates.inspection import capacity, rank_tokens, spread, summarise

    times = spread(log_beta.shape[-1], 12)
    live = capacity(log_beta, times)
    places = [(place, head) for place in range(len(layers)) for head in range(log_beta.shape[1])]
    return {
        "memory": memory,
        "half_life": asdict(summarise(log_beta)),
        "heads": [
            {
                "layer": layers[place],
                "head": head,
                "half_life": asdict(summarise(log_beta[place, head])),
                "live": [round(each, 3) for each in live[place, head].tolist()],
            }
            for place, head in places
        ],
        "capacity": {
            "tokens": [time + 1 for time in times],
            "live_mean": [round(each, 3) for each in live.mean((0, 1)).tolist()],
        },
        "ranked": [asdict(token) for token in rank_tokens(log_beta)],
    }
