"""Memory of the whole process while a long prompt is read, evicted, and answered: does it come back?

    python benchmarks/memory_over_time.py --out benchmarks/results/memory-cpu.jsonl
    python benchmarks/memory_over_time.py --plot benchmarks/results/memory-cpu.jsonl --svg memory.svg

One run per store, each in a process of its own. A thread samples the resident memory ten times a second; the
main thread notes when the prompt had been read and when the first eviction was over. The prompt is cut from
this repository's own documentation and repeated.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch

import kvkeep
from kvkeep.cli import loading, report
from kvkeep.engine.generation import cache_argument

ROOT = Path(__file__).parents[1]


def sample(rows: list[dict[str, Any]], stop: threading.Event, begin: float) -> None:
    """Note the resident memory of this process until told to stop."""
    process = psutil.Process()
    while not stop.is_set():
        rows.append({"seconds": round(time.perf_counter() - begin, 2), "rss": process.memory_info().rss})
        time.sleep(0.1)


def run(given: argparse.Namespace) -> None:
    """Read the prompt, evict, decode; print JSON lines."""
    source = loading.resolve(given.model, report.note)
    loaded = loading.load_model(
        source, dtype="float32", attention="sdpa", device="auto", threads=given.threads
    )
    model, tokenizer = loaded.model, loaded.tokenizer
    text = "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    tokens = tokenizer(text)["input_ids"]
    tokens = (tokens * (-(-given.prompt * given.batch // len(tokens))))[: given.prompt * given.batch]
    ids = torch.tensor(tokens).view(given.batch, given.prompt)
    policy = kvkeep.policy(given.policy, budget=given.budget, prefill="after")
    cache = kvkeep.RetentionCache(model, policy, store=given.store)
    rows: list[dict[str, Any]] = []
    stop, begin = threading.Event(), time.perf_counter()
    watcher = threading.Thread(target=sample, args=(rows, stop, begin))
    watcher.start()
    marks: dict[str, float] = {}
    with torch.inference_mode():
        for start in range(0, given.prompt, given.chunk):
            part = ids[:, start : start + given.chunk]
            output = model(input_ids=part, **{cache_argument(model): cache}, logits_to_keep=1)
            sys.stderr.write(f"{given.store}: {start + part.shape[1]}/{given.prompt} tokens read\n")
        held = cache.trace.kv_bytes
        marks["prompt read"] = round(time.perf_counter() - begin, 2)
        time.sleep(1)
        for step in range(given.steps):
            token = output.logits[:, -1:].argmax(-1)
            output = model(input_ids=token, **{cache_argument(model): cache})
            if step == 0:
                marks["first token"] = round(time.perf_counter() - begin, 2)
    stop.set()
    watcher.join()
    cache.check_integrity()
    entry = cache.spec.bytes_per_entry(4) * given.batch
    facts = {
        "store": given.store,
        "policy": policy.name,
        "budget": given.budget,
        "prompt": given.prompt,
        "batch": given.batch,
        "steps": given.steps,
        "kv_bytes_of_prompt": held,
        "kv_bytes": cache.trace.kv_bytes,
        "kv_bytes_of_budget_and_buffer": entry * (given.budget + policy.buffer),
        "kv_bytes_of_a_page_per_head": entry * 32,
        "marks": marks,
    }
    for row in (facts, *rows):
        print(json.dumps(row))


def plot(given: argparse.Namespace) -> None:
    """Draw resident memory over time, one line per store, as SVG."""
    series: dict[str, list[tuple[float, float]]] = {}
    facts: list[dict[str, Any]] = []
    for line in given.plot.read_text().splitlines():
        row = json.loads(line)
        if "store" in row:
            facts.append(row)
            series[row["store"]] = []
        else:
            series[facts[-1]["store"]].append((row["seconds"], row["rss"] / 2**30))
    given.svg.write_text(svg(series, facts))


def svg(series: dict[str, list[tuple[float, float]]], facts: list[dict[str, Any]]) -> str:
    """A plain line chart that reads in light and dark."""
    width, height, left, bottom, top, right = 760, 360, 60, 48, 40, 150
    last = max(x for line in series.values() for x, _ in line)
    most = max(y for line in series.values() for _, y in line) * 1.08
    colours = {"dense": "#4477aa", "paged": "#cc6677"}

    def place(x: float, y: float) -> str:
        across = left + x / last * (width - left - right)
        return f"{across:.1f},{height - bottom - y / most * (height - bottom - top):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{left}" y="22" font-size="14">Resident memory of the process: {facts[0]["batch"]} prompts '
        f"of {facts[0]['prompt']} tokens, then budget {facts[0]['budget']}</text>",
    ]
    for tick in range(int(most) + 1):
        y = place(0, tick).split(",")[1]
        parts.append(f'<line x1="{left}" x2="{width - right}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 8}" y="{float(y) + 4}" text-anchor="end">{tick} GiB</text>')
    for share in range(5):
        x = place(last * share / 4, 0).split(",")[0]
        parts.append(
            f'<text x="{x}" y="{height - bottom + 18}" text-anchor="middle">{last * share / 4:.0f} s</text>'
        )
    for number, fact in enumerate(facts):
        store, colour = fact["store"], colours[fact["store"]]
        points = " ".join(place(x, y) for x, y in series[store])
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{points}"/>')
        x = place(fact["marks"]["first token"], 0).split(",")[0]
        parts.append(
            f'<line x1="{x}" x2="{x}" y1="{top}" y2="{height - bottom}" stroke="{colour}" '
            'stroke-dasharray="3 3"/>'
        )
        y = top + 16 + 18 * number
        parts.append(f'<text x="{width - right + 10}" y="{y}" fill="{colour}">{store}</text>')
    parts.append(
        f'<text x="{left}" y="{height - 10}">dashed: the first new token, after the prompt was evicted</text>'
    )
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """One process per store, or the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--policy", default="vase-attnv")
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--chunk", type=int, default=512, help="tokens per forward while the prompt is read")
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--store", choices=("dense", "paged"), default=None, help="run this one here")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--plot", type=Path, default=None)
    parser.add_argument("--svg", type=Path, default=None)
    given = parser.parse_args()
    if given.plot is not None:
        plot(given)
        return
    if given.store is not None:
        run(given)
        return
    lines = [
        subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--store", store], check=True, stdout=subprocess.PIPE
        ).stdout.decode()
        for store in ("dense", "paged")
    ]
    given.out.write_text("".join(lines))
    for line in "".join(lines).splitlines():
        if "store" in json.loads(line):
            print(line)


if __name__ == "__main__":
    main()
