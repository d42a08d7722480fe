"""`kvkeep perplexity`: how well a model predicts a text while a policy bounds its memory."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvkeep.cli import options as opt
from kvkeep.core.budget import format_bytes
from kvkeep.core.errors import ConfigError

if TYPE_CHECKING:
    from kvkeep.core.policy import Policy
    from kvkeep.evaluation.likelihood import WindowScore
    from kvkeep.evaluation.likelihood_summary import Estimate

# The arms of a measurement.
OWN, FULL = "own", "full"


def perplexity(
    texts: Annotated[
        list[Path], typer.Argument(help="Plain text files; each is cut into windows by itself.")
    ],
    model: opt.Model = "demo",
    policy: opt.PolicyText = "vase-attnv",
    budget: opt.Entries = None,
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
    kv_sinks: opt.KvSinks = None,
    kv_recent: opt.KvRecent = None,
    window: Annotated[int, typer.Option(help="Tokens of a window; the rest of a text is left out.")] = 2048,
    chunk: Annotated[
        int | None,
        typer.Option(
            help="Tokens read at once, and the distance of evictions; 1 decodes token by token [the buffer]."
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Windows of each text at most.")] = None,
    batch_size: Annotated[int, typer.Option(help="Windows read together.")] = 8,
    beside_full: Annotated[
        bool, typer.Option("--beside-full", help="Read everything again with the full cache, and compare.")
    ] = False,
    seed: opt.Seed = 0,
    threads: opt.Threads = None,
    dtype: opt.Dtype = "float32",
    attention: opt.Attention = "sdpa",
    device: opt.Device = "auto",
    as_json: opt.AsJson = False,
) -> None:
    """Measure the log-likelihood of texts under a policy (teacher-forced)."""
    from kvkeep.cli.calibrate import bar, read_text

    if batch_size < 1:
        raise ConfigError(f"--batch-size {batch_size} reads no window: give at least 1.")
    words = [read_text(path) for path in texts]
    amount = opt.make_budget(budget, None, None, "counts")
    chosen = opt.make_policy(
        policy,
        amount,
        buffer=buffer,
        prefill=None if chunk == 1 else "chunk",
        options=option,
        token_budget=token_budget,
    )
    opt.refuse_unused(chosen, amount)
    precision = opt.make_precision(
        kv_bits, protect, kv_group, kv_reserve, kv_sinks, kv_recent, key_bits=kv_key_bits
    )
    opt.require_calibration(chosen, calibration)
    opt.require_gates(chosen, gates)
    if chunk is None:
        one_by_one = chosen.traits.reads is not None or chosen.traits.trigger.needs_entropy
        chunk = 1 if one_by_one else chosen.buffer

    from kvkeep.cli import loading, report
    from kvkeep.engine.spec import model_spec
    from kvkeep.evaluation.likelihood import check_reading, cut, read_windows

    source = loading.resolve(model, report.note)
    limits = model_spec(loading.load_config(source)).max_positions
    check_reading(chosen, chunk=chunk, window=window, max_positions=limits)
    with report.waiting(f"loading {model}"):
        loaded = loading.load_model(source, dtype=dtype, attention=attention, device=device, threads=threads)
    statistics = loading.load_calibration(calibration, loaded)
    trained = loading.load_gates(gates, loaded)

    import torch

    parts = [cut(loaded.tokenizer(each, verbose=False)["input_ids"], window, limit) for each in words]
    windows = torch.cat(parts)
    arms = {OWN: (chosen, precision)} | ({FULL: (_full(), None)} if beside_full else {})
    scores: dict[str, list[WindowScore]] = {name: [] for name in arms}
    with bar() as show:
        done = 0

        def on_chunk(tokens: int) -> None:
            nonlocal done
            done += tokens
            show(done, windows.numel() * len(arms))

        for name, (arm, store) in arms.items():
            for start in range(0, len(windows), batch_size):
                batch = windows[start : start + batch_size]
                scores[name] += read_windows(
                    loaded.model,
                    arm,
                    batch,
                    chunk=chunk,
                    names=list(range(start, start + len(batch))),
                    seed=seed,
                    calibration=statistics,
                    gates=trained,
                    precision=store,
                    on_chunk=on_chunk,
                )
    facts = {
        "command": ["kvkeep", *sys.argv[1:]],
        "texts": [
            {"name": path.name, "sha256": hashlib.sha256(text.encode()).hexdigest(), "windows": len(part)}
            for path, text, part in zip(texts, words, parts, strict=True)
        ],
        "model": model,
        "policy": {"name": chosen.name, "options": chosen.options()},
        "precision": None if precision is None else precision.as_dict(),
        "seed": seed,
        "window": window,
        "chunk": chunk,
        "gates_sha256": None if trained is None else trained.sha256,
    }
    if as_json:
        typer.echo(report.as_json(_everything(facts, scores, chosen, loaded, statistics)))
        return
    typer.echo(in_words(facts, scores, chosen))


def _full() -> Policy:
    from kvkeep.policies.full import Full

    return Full()


def _everything(
    facts: dict[str, Any], scores: dict[str, list[WindowScore]], policy: Policy, loaded: Any, statistics: Any
) -> dict[str, Any]:
    """All figures, window by window, and who produced them."""
    from kvkeep.evaluation.identity import hardware, versions, weights_sha256
    from kvkeep.evaluation.likelihood_summary import difference, summarise

    own = scores[OWN]
    more: dict[str, Any] = {**summarise(own).as_dict(), "scores": [score.as_dict() for score in own]}
    if FULL in scores and (policy.name != "full" or facts["precision"]):
        full = scores[FULL]
        more["full"] = {
            **summarise(full, own[0].full_at).as_dict(),
            "scores": [score.as_dict() for score in full],
            "difference": asdict(difference(full, own)),
            "difference_after": asdict(difference(full, own, own[0].full_at)),
        }
    return {
        **facts,
        "model_sha256": weights_sha256(loaded.model),
        "calibration_sha256": None if statistics is None else statistics.sha256,
        "versions": versions(),
        "hardware": hardware(),
        **more,
    }


def in_words(facts: dict[str, Any], scores: dict[str, list[WindowScore]], policy: Policy) -> str:
    """The result in a few lines."""
    from kvkeep.core.precision import widths
    from kvkeep.evaluation.likelihood_summary import difference, summarise

    own = scores[OWN]
    found = summarise(own)
    asked = f", budget {policy.amount}" if policy.bounded else ""
    if facts["precision"]:
        rule = facts["precision"]["protect"]
        asked += f", {widths(facts['precision'])}" + ("" if rule == "none" else f" but for {rule}")
    lines = [
        f"{found.windows} windows of {facts['window']} tokens, {facts['model']}, {policy.name}{asked}, read "
        f"{facts['chunk']} at a time",
        f"  {nats(found.all_tokens)} nats a token, perplexity {found.perplexity:.2f}",
        f"  cache: mean {found.mean_cache:.1f}, peak {found.peak_cache} entries per head, {found.evictions} "
        f"evictions a window; {format_bytes(max(score.kv_bytes for score in own))} a window at most",
    ]
    if found.before is not None and found.after is not None:
        lines.insert(
            2,
            f"  before the first eviction {nats(found.before)} ({found.before.tokens} tokens), after it "
            f"{nats(found.after)} ({found.after.tokens})",
        )
    elif policy.bounded:
        lines.insert(1, "  0 evicted: the policy never came into play.")
    if FULL in scores and (policy.name != "full" or facts["precision"]):
        full, part = scores[FULL], own[0].full_at
        beside = summarise(full, part)
        lines.append(
            f"  full cache: {nats(beside.all_tokens)} nats a token, perplexity {beside.perplexity:.2f}, mean "
            f"{beside.mean_cache:.1f} entries; {policy.name} pays {nats(difference(full, own), '+')} more"
            + (f", after the eviction {nats(difference(full, own, part), '+')}" if part else "")
        )
    return "\n".join(lines)


def nats(estimate: Estimate, sign: str = "") -> str:
    """A figure with its interval over windows."""
    if estimate.interval is None:
        return f"{estimate.nats:{sign}.4f}"
    low, high = estimate.interval
    return f"{estimate.nats:{sign}.4f} [{low:{sign}.4f}, {high:{sign}.4f}]"
