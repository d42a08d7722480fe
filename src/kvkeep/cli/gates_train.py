"""`kvkeep gates train`: retention gates for a frozen model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvkeep.cli import gates_resuming
from kvkeep.cli import options as opt
from kvkeep.core.errors import ConfigError, KvkeepError

_HELD_OUT_BATCHES = 8


def train(
    data: Annotated[
        str,
        typer.Option(help="Text file, .jsonl of chats, prompts with completions or texts, or a task: trace."),
    ],
    memory: Annotated[
        float, typer.Option(help="Entries per KV head to live with; below 1 a share of the row.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for gates, card, log and checkpoint.")],
    model: opt.Model = "demo",
    policy: Annotated[
        str, typer.Option(help="What the gates are for: dbtrimkv (one budget) or trimkv (one per head).")
    ] = "dbtrimkv",
    tied: Annotated[
        bool | None, typer.Option("--tied/--untied", help="One last projection for all layers [dbtrimkv].")
    ] = None,
    scalar: Annotated[bool, typer.Option(help="One row of the last projection for all heads.")] = False,
    width: Annotated[
        int | None, typer.Option(help="Channels of the gates [512, or the model's if fewer].")
    ] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 1000,
    row: Annotated[int, typer.Option(help="Tokens of a packed row; well above the memory.")] = 4096,
    rows: Annotated[int, typer.Option(help="Rows in one forward.")] = 1,
    accumulate: Annotated[int, typer.Option(help="Forwards in one step.")] = 4,
    rate: Annotated[float, typer.Option(help="Largest learning rate.")] = 2e-4,
    warmup: Annotated[
        int | None, typer.Option(help="Steps in which the rate rises [100, or a tenth of fewer than 1,000].")
    ] = None,
    bias: Annotated[float, typer.Option(help="Where the gates start: 18 keeps everything.")] = 18.0,
    kl: Annotated[float, typer.Option(help="Weight of the distance to the full cache.")] = 1.0,
    next_token: Annotated[float, typer.Option(help="Weight of the next-token loss.")] = 1.0,
    capacity: Annotated[float, typer.Option(help="Weight of the excess over the memory.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of first weights and data order.")] = 0,
    block: Annotated[int, typer.Option(help="Tokens whose logits exist at once.")] = 8192,
    checkpointing: Annotated[
        bool, typer.Option(help="Compute activations twice: less memory, a third more time.")
    ] = False,
    resume: Annotated[bool, typer.Option(help="Continue from the checkpoint in --out.")] = False,
    threads: opt.Threads = None,
    dtype: opt.Dtype = "float32",
    device: opt.Device = "auto",
    as_json: opt.AsJson = False,
) -> None:
    """Train retention gates for a model whose weights stay as they are.

    With several processes or GPUs: `accelerate launch -m kvkeep gates train …`.
    """
    from kvkeep.training import Recipe, train, training
    from kvkeep.training.session import make_accelerator

    if policy not in ("dbtrimkv", "trimkv"):
        raise ConfigError(f"--policy {policy} has no gates: choose dbtrimkv or trimkv.")
    recipe = Recipe(
        memory=memory,
        architecture="rg10" if policy == "dbtrimkv" else "rg",
        tied=tied,
        scalar=scalar,
        width=width,
        steps=steps,
        row=row,
        rows=rows,
        accumulate=accumulate,
        rate=rate,
        warmup=warmup,
        bias=bias,
        kl=kl,
        next_token=next_token,
        capacity=capacity,
        seed=seed,
        block=block,
        checkpointing=checkpointing,
    )
    from kvkeep.cli.gates_words import CARD, card, plan, summary
    from kvkeep.gates.files import FILE

    gates_resuming.require_free(out, resume, (FILE, CARD))
    from kvkeep.cli import loading, report
    from kvkeep.cli.gates_data import choose, documents
    from kvkeep.cli.gates_measured import evicting
    from kvkeep.engine.spec import model_spec
    from kvkeep.evaluation.identity import weights_sha256
    from kvkeep.gates import save

    chosen = choose(data)
    accelerator = make_accelerator(recipe, cpu=device == "cpu")
    source = loading.resolve(model, report.note)
    place = str(accelerator.device) if device == "auto" else device
    with report.waiting(f"loading {model}"):
        loaded = loading.load_model(source, dtype=dtype, attention="sdpa", device=place, threads=threads)
    base = weights_sha256(loaded.model)
    limit = model_spec(loaded.model.config).max_positions
    learned, held_out = documents(data, chosen, loaded.tokenizer, recipe, limit)
    with training(loaded.model, learned, recipe, base, accelerator) as trainer:
        if accelerator.is_main_process and not as_json:
            typer.echo(plan(trainer, data, model))
        with gates_resuming.saying_how_to_go_on(trainer, out):
            train(trainer, out, resume=resume, report=gates_resuming.lines(recipe.steps))
        measured = trainer.measure(held_out, _HELD_OUT_BATCHES)
        if weights_sha256(loaded.model) != base:
            raise KvkeepError("the weights of the model changed during training: nothing was saved.")
        if not accelerator.is_main_process:
            return
        facts = {
            "model": model,
            "data": learned.name,
            "recipe": recipe.facts(),
            "step": trainer.step,
            "tokens": trainer.tokens,
            "seconds": round(trainer.seconds, 1),
            "held_out": {name: round(value, 6) + 0.0 for name, value in measured.items()},
        }
        gates = trainer.student.gates
    # The model attends as before again, and real evictions are possible. What they show is worth less than
    # the gates: those are safe before it is measured.
    save(gates, out / FILE, base_sha256=base, training=facts)
    facts["evicting"] = evicting(loaded.model, policy, gates, held_out, recipe.memory)
    save(gates, out / FILE, base_sha256=base, training=facts)
    (out / CARD).write_text(card(facts, base, policy), encoding="utf-8")
    typer.echo(report.as_json(facts) if as_json else "\n".join(summary(facts, out, policy)))
