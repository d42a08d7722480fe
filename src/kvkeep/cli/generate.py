"""`kvkeep generate`: text from a model whose memory is bounded by a policy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvkeep.cli import options as opt
from kvkeep.cli.prompts import read_prompts


def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt [standard input].")] = None,
    model: opt.Model = "demo",
    policy: opt.PolicyText = "vase-attnv",
    budget: opt.Entries = None,
    keep_ratio: opt.KeepRatio = None,
    kv_bytes: opt.KvBytes = None,
    prompt_mode: opt.PromptMode = "counts",
    buffer: opt.Buffer = None,
    token_budget: opt.TokenBudget = None,
    option: opt.PolicyOptions = None,
    calibration: opt.Calibration = None,
    gates: opt.Gates = None,
    kv_bits: opt.KvBits = None,
    kv_key_bits: opt.KvKeyBits = None,
    protect: opt.ProtectRule = None,
    kv_group: opt.KvGroup = None,
    kv_reserve: opt.KvReserve = None,
    kv_prompt: opt.KvPrompt = None,
    kv_sinks: opt.KvSinks = None,
    kv_recent: opt.KvRecent = None,
    prefill: opt.Prefill = None,
    prefill_chunk: opt.PrefillChunk = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Read the prompt from this file.")] = None,
    batch_file: Annotated[
        Path | None,
        typer.Option(
            help='Many prompts, as one batch: one a line, or {"prompt": …} a line in a .jsonl file.'
        ),
    ] = None,
    chat: Annotated[
        bool | None, typer.Option("--chat/--no-chat", help="Use the chat template [if the model has one].")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to write per prompt.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens of this share.")] = 1.0,
    repetition_rise: Annotated[
        float,
        typer.Option(help="Temperature added to a text that only repeats itself, by its repeated n-grams."),
    ] = 0.0,
    store: opt.Store = "auto",
    seed: opt.Seed = 0,
    threads: opt.Threads = None,
    dtype: opt.Dtype = "float32",
    attention: opt.Attention = "sdpa",
    device: opt.Device = "auto",
    as_json: opt.AsJson = False,
) -> None:
    """Write text under a policy, then report the memory that was measured."""
    prompts = read_prompts(prompt, prompt_file, batch_file)
    amount = opt.make_budget(budget, keep_ratio, kv_bytes, prompt_mode)
    chosen = opt.make_policy(
        policy,
        amount,
        buffer=buffer,
        prefill=prefill,
        prefill_chunk=prefill_chunk,
        options=option,
        token_budget=token_budget,
    )
    opt.refuse_unused(chosen, amount)
    precision = opt.make_precision(
        kv_bits, protect, kv_group, kv_reserve, kv_sinks, kv_recent, kv_prompt, kv_key_bits
    )
    opt.require_calibration(chosen, calibration)
    opt.require_gates(chosen, gates)

    from kvkeep.cli import answering, loading, report

    sampling = answering.Sampling(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        repetition_rise=repetition_rise,
    )
    source = loading.resolve(model, report.note)
    with report.waiting(f"loading {model}"):
        loaded = loading.load_model(source, dtype=dtype, attention=attention, device=device, threads=threads)
    statistics = loading.load_calibration(calibration, loaded)
    alone = len(prompts) == 1 and not as_json
    with report.steps(max_new_tokens, show=not alone) as on_step:
        run = answering.answer(
            loaded,
            chosen,
            prompts,
            sampling,
            chat=chat,
            seed=seed,
            calibration=statistics,
            gates=loading.load_gates(gates, loaded),
            store=store,
            precision=precision,
            prefill_chunk=prefill_chunk,
            on_text=report.write if alone else None,
            on_step=on_step,
        )
    if as_json:
        typer.echo(report.as_json(report.as_dict(model, chosen, seed, run)))
        return
    if alone:
        typer.echo()
    else:
        report.show_texts(run)
    report.show_runs([run])
