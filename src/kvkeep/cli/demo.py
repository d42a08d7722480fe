"""`kvkeep demo`: one long prompt, answered with the full cache and under policies with a part of it."""

from __future__ import annotations

from typing import Annotated

import typer

from kvkeep.cli import options as opt
from kvkeep.core.errors import ConfigError

# Tokens that may be written: enough for the answer.
_NEW_TOKENS = 48


def demo(
    policies: Annotated[
        str, typer.Option(help="Policies to show, separated by ';'. 'full' is the full cache.")
    ] = "full; vase-attnv",
    keep_ratio: Annotated[float, typer.Option(help="Memory of each policy, as a part of the full.")] = 0.25,
    prefill: Annotated[
        str | None,
        typer.Option(
            help="When to evict while reading: defer, after, chunk [after; chunk with --prefill-chunk]."
        ),
    ] = None,
    prefill_chunk: opt.PrefillChunk = None,
    seed: opt.Seed = 0,
    threads: opt.Threads = None,
    accuracy: Annotated[
        bool, typer.Option("--accuracy/--no-accuracy", help="End with accuracies of the built-in reasoner.")
    ] = True,
    model_only: Annotated[bool, typer.Option(help="Only fetch and convert the model.")] = False,
    as_json: opt.AsJson = False,
) -> None:
    """Answer a question about a 2,000-token ship's log, with all of the cache and with a quarter of it.

    At the end the built-in reasoner runs small programs under several policies: a minute, no download.
    """
    from kvkeep.cli import loading, report

    if model_only:
        report.note(f"The demo model is at {loading.resolve('demo', report.note)}.")
        return
    names = [name.strip() for name in policies.split(";") if name.strip()]
    if not names:
        raise ConfigError("no policy was named: give --policies 'full; vase-attnv'.")
    amount = opt.make_budget(None, keep_ratio, None, "counts")
    # A short answer would end before the periodic trigger of most policies evicts for the first time.
    prefill = prefill or ("after" if prefill_chunk is None else "chunk")
    chosen = [opt.make_policy(name, amount, prefill=prefill, prefill_chunk=prefill_chunk) for name in names]
    for each in chosen:
        if each.traits.calibration:
            raise ConfigError(
                f"{each.name} needs statistics of the model, which the demo has not: try another."
            )

    source = loading.resolve("demo", report.note)
    from kvkeep.cli import answering
    from kvkeep.cli.ship_log import DAYS, QUESTION, demo_prompt

    with report.waiting("loading SmolLM2-135M-Instruct"):
        loaded = loading.load_model(source, dtype="float32", attention="sdpa", device="auto", threads=threads)
    prompt = demo_prompt()
    sampling = answering.Sampling(max_new_tokens=_NEW_TOKENS)
    runs = []
    if not as_json:
        typer.echo(f"The prompt is the log of a ship, {DAYS} days long, and at its end: {QUESTION}")
    for policy in chosen:
        if not as_json:
            report.heading(f"{policy.name}, asked for {policy.request}")
        with report.waiting("reading the prompt") as done:
            runs.append(
                answering.answer(
                    loaded,
                    policy,
                    [prompt],
                    sampling,
                    seed=seed,
                    prefill_chunk=prefill_chunk,
                    on_text=None if as_json else report.write,
                    on_step=done,
                )
            )
        if not as_json:
            typer.echo()
    if as_json:
        facts = [report.as_dict("demo", policy, seed, run) for policy, run in zip(chosen, runs, strict=True)]
        typer.echo(report.as_json(facts))
        return
    report.show_runs(runs)
    if prefill == "after":
        report.aside("The peak is the prompt, read in one piece; it is evicted before the first new token.")
    if accuracy:
        show_accuracies(seed, threads)


def show_accuracies(seed: int, threads: int | None) -> None:
    """Run the built-in reasoner under several policies, if its weights are there."""
    from kvkeep.cli import demo_table, loading, report
    from kvkeep.testbed.shipped import shipped_model, shipped_models

    if demo_table.NAME not in shipped_models():
        report.note(
            "No accuracies: the weights of the built-in reasoner are not part of this copy of kvkeep."
        )
        return
    source = str(shipped_model(demo_table.NAME))
    loaded = loading.load_model(source, dtype="float32", attention="sdpa", device="cpu", threads=threads)
    demo_table.show(demo_table.measure(loaded.model, report.waiting, seed=seed))
