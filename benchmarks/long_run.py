"""One sequence of a hundred thousand generated tokens: flat memory, flat time, no NaN, books in order.

    python benchmarks/long_run.py --model trace-1 --policy "snapkv + whole-model" --budget 256 \\
        --tokens 100000 --out benchmarks/results/long-run-cpu.json

With ``--resume FOLDER`` the state is written there after every window, and a second start goes on from it.
Tokens are sampled at temperature 1, so that the text never settles into a loop. After every window the pages
are counted and the positions checked. A model far beyond the positions that it was trained for writes
nonsense: this measures the cache, not the text.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import psutil
import torch

import kvkeep
from kvkeep.benchmarking.models import random_prompt
from kvkeep.benchmarking.report import describe_machine
from kvkeep.cli import loading, report
from kvkeep.engine.generation import cache_argument

CACHE, STATE = "cache.safetensors", "state.pt"


def main() -> None:
    """Run; print a line per window and write what is known so far."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="trace-1")
    parser.add_argument("--policy", default="snapkv + whole-model")
    parser.add_argument("--store", default="auto")
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--window", type=int, default=5_000)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--resume", type=Path, default=None, help="folder for the state between windows")
    given = parser.parse_args()
    source = loading.resolve(given.model, report.note)
    model = loading.load_model(
        source, dtype="float32", attention="sdpa", device="auto", threads=given.threads
    ).model
    policy = kvkeep.policy(given.policy, budget=given.budget)
    cache = kvkeep.RetentionCache(model, policy, store=given.store, seed=given.seed)
    generator = torch.Generator(device=model.device).manual_seed(given.seed)
    token = random_prompt(model, 1, 64, given.seed)
    windows, process, machine = [], psutil.Process(), describe_machine(model)
    evictions = 0
    if given.resume is not None and (given.resume / STATE).exists():
        state = torch.load(given.resume / STATE, weights_only=True)
        windows, token, evictions = state["windows"], state["token"], state["evictions"]
        generator.set_state(state["generator"])
        cache = kvkeep.RetentionCache.load(
            given.resume / CACHE, model, policy, store=given.store, seed=given.seed
        )
    with torch.inference_mode():
        for begin in range(len(windows) * given.window, given.tokens, given.window):
            seconds, finite, most, spent = [], True, 0, time.process_time()
            for _ in range(given.window):
                start = time.perf_counter()
                logits = model(input_ids=token, **{cache_argument(model): cache}).logits[:, -1]
                seconds.append(time.perf_counter() - start)
                finite = finite and bool(logits.isfinite().all())
                token = torch.multinomial(logits.softmax(-1), 1, generator=generator)
                most = max(most, max(layer.stored.longest for layer in cache.managed_layers))
            cache.check_integrity()
            trace = cache.trace
            windows.append(
                {
                    "tokens": begin + given.window,
                    "ms_per_token": round(1e3 * statistics.fmean(seconds), 3),
                    "median_ms": round(1e3 * statistics.median(seconds), 3),
                    "cpu_ms_per_token": round(1e3 * (time.process_time() - spent) / given.window, 3),
                    "rss": process.memory_info().rss,
                    "kv_bytes": trace.kv_bytes,
                    "peak_kv_bytes": trace.peak_kv_bytes,
                    "mean_entries": round(trace.mean_entries, 2),
                    "longest_head": most,
                    "finite": finite,
                }
            )
            sys.stderr.write(json.dumps(windows[-1]) + "\n")
            if given.out is not None:
                facts = {
                    "machine": machine,
                    "policy": cache.policy.name,
                    "budget": given.budget,
                    "store": cache.store_kind,
                    "evictions": evictions + trace.evictions,
                    "integrity": "checked after every window",
                    "windows": windows,
                }
                given.out.write_text(json.dumps(facts, indent=1) + "\n")
            if given.resume is not None:
                given.resume.mkdir(parents=True, exist_ok=True)
                cache.save(given.resume / CACHE)
                state = {
                    "windows": windows,
                    "token": token,
                    "evictions": evictions + trace.evictions,
                    "generator": generator.get_state(),
                }
                torch.save(state, given.resume / STATE)


if __name__ == "__main__":
    main()
