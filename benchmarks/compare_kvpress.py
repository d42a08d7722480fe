"""Decode speed and memory of kvpress, stock transformers and kvkeep, interleaved, on one model.

kvpress 0.5.5 needs transformers below 5.3 and kvkeep needs 5.16 or later, so no single environment holds
both: two worker processes wait on pipes, and this program hands the turn to one of them at a time.
While one computes, the other sleeps.

    python benchmarks/compare_kvpress.py --setup               # once: the other environment, 1.4 GB
    python benchmarks/compare_kvpress.py --model PATH --out benchmarks/results/kvpress.md
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvkeep.benchmarking.report import markdown_table
from kvkeep.benchmarking.timing import Spread
from kvkeep.core.budget import format_bytes

HERE = Path(__file__).resolve().parent
ENVIRONMENT = HERE.parent / ".venv-kvpress"
WORKER = HERE / "decode_worker.py"
SETUP = (
    ["install", "torch==2.13.0"],
    ["install", "kvpress==0.5.5", "accelerate", "safetensors"],
)


class Worker:
    """A process that decodes when told to.

    Parameters
    ----------
    command
        Starts it; it answers each line of JSON on stdin with one on stdout.
    """

    def __init__(self, command: list[str], threads: int) -> None:
        environment = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": "PASSIVE",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_VERBOSITY": "error",
        }
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.hello = self._answer()
        self.arms: list[str] = self.hello["arms"]

    def block(self, arm: str) -> dict[str, Any]:
        """Let one arm decode one block, and wait for it."""
        if self.process.stdin is None:
            raise RuntimeError("the worker has no stdin")
        self.process.stdin.write(json.dumps({"arm": arm}) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End of input ends the worker."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait(timeout=60)
        if self.process.stdout is not None:
            self.process.stdout.close()

    def _answer(self) -> dict[str, Any]:
        if self.process.stdout is None:
            raise RuntimeError("the worker has no stdout")
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker died with code {self.process.wait()}; its message stands above")
        return dict(json.loads(line))


@dataclass
class Row:
    """One arm over all rounds."""

    name: str
    stack: str
    ms: list[float] = field(default_factory=list)
    entries: int = 0
    cache_bytes: int = 0
    failure: str | None = None


def compare(workers: list[Worker], rounds: int, batch: int, say: Any = print) -> list[Row]:
    """Run every arm once per round, backwards in every other round, one at a time.

    An arm that fails keeps its message and is not run again.
    """
    turns = [(worker, arm) for worker in workers for arm in worker.arms]
    rows = {(id(worker), arm): Row(arm, worker.hello["stack"]) for worker, arm in turns}
    for turn in range(rounds + 1):  # the first round warms up
        for worker, arm in turns if turn % 2 == 0 else reversed(turns):
            row = rows[id(worker), arm]
            if row.failure is not None:
                continue
            answer = worker.block(arm)
            if "failure" in answer:
                row.failure = answer["failure"]
                say(f"{arm}: {row.failure}")
                continue
            row.entries, row.cache_bytes = answer["entries"], answer["cache_bytes"]
            if turn:
                row.ms.append(1e3 * answer["seconds"] / answer["steps"])
            label = f"round {turn} of {rounds}" if turn else "warm-up"
            say(f"{label}: {arm}: {1e3 * answer['seconds'] / answer['steps']:.1f} ms/step")
    return list(rows.values())


def table(rows: list[Row], batch: int) -> tuple[list[str], list[list[str]]]:
    """Header and cells; speed-ups are paired with the first row, round by round."""
    header = ["arm", "stack", "tokens/s", "ms/step (quartiles)", "× full", "entries", "cache"]
    base, cells = rows[0].ms, []
    for row in rows:
        if row.failure is not None:
            cells.append([row.name, row.stack, "failed", row.failure, "–", "–", "–"])
            continue
        spread = Spread.of(row.ms)
        ratio = Spread.of([a / b for a, b in zip(base, row.ms, strict=True)])
        cells.append(
            [
                row.name,
                row.stack,
                f"{1e3 * batch / spread.median:.1f}",
                f"{spread.median:.1f} ({spread.low:.1f} – {spread.high:.1f})",
                f"{ratio.median:.2f} ({ratio.low:.2f} – {ratio.high:.2f})",
                str(row.entries),
                format_bytes(row.cache_bytes),
            ]
        )
    return header, cells


def set_up() -> None:
    """Build the environment that kvpress needs."""
    subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
    for step in SETUP:
        subprocess.run([str(ENVIRONMENT / "bin" / "pip"), *step], check=True)


def arguments() -> argparse.Namespace:
    """What can be asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--setup", action="store_true", help="build the environment of kvpress and stop")
    parser.add_argument("--model", help="folder of SmolLM2-135M-Instruct (or another Llama) as safetensors")
    parser.add_argument("--kvpress-python", default=str(ENVIRONMENT / "bin" / "python"))
    parser.add_argument("--context", type=int, default=8000, help="entries before the first step")
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--buffer", type=int, default=64, help="steps between evictions, and per block")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--policies", default="key-norm,snapkv,vase-attnv,vase-dkv")
    parser.add_argument("--out", type=Path, help="write a Markdown table, or JSON if it ends in .json")
    return parser.parse_args()


def main() -> None:
    """Parse, measure, print."""
    args = arguments()
    if args.setup:
        set_up()
        return
    if args.model is None:
        raise SystemExit("give the folder of the model: --model PATH")
    if not Path(args.kvpress_python).exists():
        raise SystemExit(f"no {args.kvpress_python}: run python benchmarks/compare_kvpress.py --setup")
    shared = [str(WORKER)]
    for name in ("model", "context", "budget", "buffer", "batch", "policies"):
        shared += [f"--{name}", str(getattr(args, name))]
    workers = [
        Worker([sys.executable, *shared, "--side", "kvkeep"], args.threads),
        Worker([args.kvpress_python, *shared, "--side", "kvpress"], args.threads),
    ]
    rows = compare(workers, args.rounds, args.batch, say=lambda text: print(text, file=sys.stderr))
    for worker in workers:
        worker.close()
    header, cells = table(rows, args.batch)
    title = (
        f"SmolLM2-135M float32, batch {args.batch}, {args.context} entries before decoding, budget "
        f"{args.budget}, eviction every {args.buffer} steps, {args.rounds} interleaved rounds"
    )
    notes = [
        "the context is synthetic (normal draws with the mean and deviation of a real prompt per channel)",
        f"'× full' is paired by round with the first row; steps per block: one eviction period "
        f"({args.buffer}) for bounded caches, 8 for full ones",
    ]
    text = markdown_table(title, header, cells, notes, workers[0].hello["machine"])
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        data = {
            "kind": "compare-kvpress",
            "settings": vars(args) | {"out": None},
            "rows": [vars(r) for r in rows],
        }
        args.out.write_text(
            text if args.out.suffix != ".json" else json.dumps(data, indent=2, default=str) + "\n"
        )
    print(text)


if __name__ == "__main__":
    main()
