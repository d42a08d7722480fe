"""`kvkeep gates train-blocks`: block gates for a frozen model, which say which blocks a query attends to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvkeep.cli import gates_resuming
from kvkeep.cli import options as opt
from kvkeep.core.errors import ConfigError, KvkeepError

_HELD_OUT_BATCHES = 4


def train_blocks(
    data: Annotated[
        str,
        typer.Option(help="Text file, .jsonl of chats, prompts with completions or texts, or a task: trace."),
    ],
    out: Annotated[Path, typer.Option(help="Folder for gates, log and checkpoint.")],
    model: opt.Model = "demo",
    block: Annotated[int, typer.Option(help="Entries of a block; smaller for short sequences.")] = 64,
    width: Annotated[int | None, typer.Option(help="Channels of the gates [the model's head_dim].")] = None,
    normed: Annotated[bool, typer.Option("--norm/--no-norm", help="RMSNorm on both sides.")] = True,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 800,
    rows: Annotated[int, typer.Option(help="Documents of a step.")] = 16,
    row: Annotated[int, typer.Option(help="Tokens of a document at most; the rest is cut off.")] = 4096,
    rate: Annotated[float, typer.Option(help="Largest learning rate.")] = 1e-3,
    warmup: Annotated[int, typer.Option(help="Steps in which the rate rises.")] = 20,
    share: Annotated[float, typer.Option(help="Last part of each document whose queries count.")] = 0.5,
    token_budget: Annotated[
        int | None, typer.Option(help="Entries read, for what is measured at the end [an eighth of --row].")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of first weights and data order.")] = 0,
    resume: Annotated[bool, typer.Option(help="Continue from the checkpoint in --out.")] = False,
    threads: opt.Threads = None,
    dtype: opt.Dtype = "float32",
    device: opt.Device = "auto",
    as_json: opt.AsJson = False,
) -> None:
    """Train block gates (seer-attention) for a model whose weights stay as they are.

    The model reads, and in every layer the gates learn which blocks of entries its queries attend to.
    """
    from kvkeep.training.block_recipe import BlockRecipe

    recipe = BlockRecipe(
        block=block,
        width=width,
        normed=normed,
        steps=steps,
        rows=rows,
        row=row,
        rate=rate,
        least_rate=min(1e-5, rate),
        warmup=warmup,
        share=share,
        seed=seed,
    )
    read = max(2 * block, row // 8) if token_budget is None else token_budget
    if read < block:
        raise ConfigError(f"--token-budget {read} is less than one block of {block}.")
    from kvkeep.gates.block_files import BLOCK_FILE

    gates_resuming.require_free(out, resume, (BLOCK_FILE,))
    from kvkeep.cli import loading, report
    from kvkeep.cli.gates_data import choose, documents
    from kvkeep.engine.spec import model_spec
    from kvkeep.evaluation.identity import weights_sha256
    from kvkeep.gates.block_files import save_blocks
    from kvkeep.training.block_training import block_training
    from kvkeep.training.loop import train

    chosen = choose(data)
    source = loading.resolve(model, report.note)
    with report.waiting(f"loading {model}"):
        loaded = loading.load_model(source, dtype=dtype, attention="sdpa", device=device, threads=threads)
    base = weights_sha256(loaded.model)
    limit = model_spec(loaded.model.config).max_positions
    learned, held_out = documents(data, chosen, loaded.tokenizer, recipe, limit)
    names = {"data": learned.name, "base": base}
    with block_training(loaded.model, learned.source, recipe, **names) as trainer:
        count = sum(weight.numel() for weight in trainer.gates.parameters())
        if not as_json:
            typer.echo(
                f"{model}: {count:,} parameters on {len(trainer.gates.shape.layers)} layers, blocks of "
                f"{block}; {data}; {steps} steps of {rows} documents of at most {row} tokens; rate {rate:g}."
            )
        before = trainer.measure(held_out.source, _HELD_OUT_BATCHES, token_budget=read)
        with gates_resuming.saying_how_to_go_on(trainer, out):
            train(trainer, out, resume=resume, report=gates_resuming.lines(steps))
        measured = trainer.measure(held_out.source, _HELD_OUT_BATCHES, token_budget=read)
    if weights_sha256(loaded.model) != base:
        raise KvkeepError("the weights of the model changed during training: nothing was saved.")
    facts = {
        "model": model,
        "data": learned.name,
        "recipe": recipe.facts(),
        "parameters": count,
        "tokens": trainer.tokens,
        "seconds": round(trainer.seconds, 1),
        "held_out": measured,
        "held_out_untrained": before,
    }
    save_blocks(trainer.gates, out / BLOCK_FILE, base_sha256=base, training=facts)
    typer.echo(report.as_json(facts) if as_json else "\n".join(_summary(facts, out, block)))


def _summary(facts: dict[str, Any], out: Path, block: int) -> list[str]:
    """What came out, and how to use it."""
    now, before = facts["held_out"], facts["held_out_untrained"]
    shares = now["covered"]
    return [
        f"{out}: {facts['recipe']['steps']} steps, {facts['tokens']:,} tokens, {facts['seconds']:.0f} s; "
        f"loss {before['loss']:.3f} untrained, {now['loss']:.3f} trained (held out).",
        f"Of the attention of a query, {now['token_budget']} entries in blocks hold: {shares['gates']:.1%} "
        f"by the gates (untrained {before['covered']['gates']:.1%}), {shares['newest']:.1%} the newest, "
        f"{shares['best']:.1%} the best.",
        f"Use them: kvkeep generate --model {facts['model']} --policy seer-attention --option block={block} "
        f"--token-budget {now['token_budget']} --gates {out}",
    ]
