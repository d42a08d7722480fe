"""Tokens per second of plain vLLM and of vLLM with kvkeep, turn by turn, each in a process of its own.

    python benchmarks/vllm_throughput.py equal-memory --model FOLDER --out FILE
    python benchmarks/vllm_throughput.py equal-batch --model FOLDER --out FILE
    python benchmarks/vllm_throughput.py no-eviction --model FOLDER --out FILE

``equal-memory``: a pool that is too small for the full lengths, so that plain vLLM queues or preempts.
``equal-batch``: memory for everybody. ``no-eviction``: a budget above every length, where kvkeep must cost
nothing. ``--control`` puts plain vLLM in both places: how far its ratio is from 1 is what a ratio can be off.

Both engines stay up and take turns, so that what else the machine does hits both; who begins a turn
alternates. They are processes of their own, started together, several times: two engines in one process are
not alike (the one built second is up to a tenth faster, whichever it is), and two processes of plain vLLM
differ by some percent for as long as they live. So a launch is one observation, and the interval is over
launches.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from scipy.stats import t as student

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

#: Requests, tokens of a prompt and of an answer, blocks of the pool (None: enough), budget, buffer.
CASES: dict[str, dict[str, Any]] = {
    "equal-memory": {"requests": 12, "prompt": 64, "answer": 448, "blocks": 25, "budget": 96, "buffer": 32},
    "equal-batch": {"requests": 8, "prompt": 1024, "answer": 128, "blocks": None, "budget": 96, "buffer": 32},
    "no-eviction": {"requests": 8, "prompt": 64, "answer": 256, "blocks": None, "budget": 1024, "buffer": 32},
}

_WARM_UP = 32


def main() -> None:
    """Run one case; print a JSON line per turn and write the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("case", choices=sorted(CASES))
    parser.add_argument("--model", required=True)
    parser.add_argument("--policy", default="vase-dkv")
    parser.add_argument("--launches", type=int, default=4, help="times that both engines are started")
    parser.add_argument("--turns", type=int, default=3, help="of each engine in a launch")
    parser.add_argument("--control", action="store_true", help="plain vLLM in both places")
    parser.add_argument("--block-size", type=int, default=32)
    for name in ("requests", "prompt", "answer", "blocks", "budget", "buffer"):
        parser.add_argument(f"--{name}", type=int, default=None, help="instead of the case's own")
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    case = {
        key: value if getattr(given, key) is None else getattr(given, key)
        for key, value in CASES[given.case].items()
    }
    setting = {"policy": given.policy, "budget": case["budget"], "buffer": case["buffer"]}
    settings = {"plain": None, "kvkeep": None if given.control else setting}
    launches = []
    for launch in range(given.launches):
        order = ("plain", "kvkeep")[:: 1 if launch % 2 == 0 else -1]
        processes = {name: Process(given.model, given.block_size, case, settings[name]) for name in order}
        launches.append(_launch(processes, given.turns))
        sys.stderr.write(f"launch {launch + 1} of {given.launches}: {launches[-1]['ratio']}\n")
    summary = {
        "case": given.case,
        **case,
        "policy": "none: plain vLLM twice" if given.control else given.policy,
        "model": Path(given.model).name,
        **{f"mean_{kind}": _mean([each[kind] for each in launches]) for kind in ("ratio", "ratio_of_steps")},
        "launches": launches,
    }
    print(json.dumps({key: value for key, value in summary.items() if key != "launches"}))
    if given.out is not None:
        given.out.write_text(json.dumps(summary, indent=1) + "\n")


def _launch(processes: dict[str, Process], count: int) -> dict[str, Any]:
    """Turns of two engines that were started together, and how the second compares."""
    for process in processes.values():
        process.ready()
    for process in processes.values():  # does not count: first calls compile and fill caches
        process.turn(_WARM_UP)
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in processes}
    for turn in range(count):
        for name in list(processes)[:: 1 if turn % 2 == 0 else -1]:
            turns[name].append({"turn": turn, "arm": name, **processes[name].turn()})
            sys.stderr.write(json.dumps(turns[name][-1]) + "\n")
    for process in processes.values():
        process.close()
    pairs = list(zip(turns["plain"], turns["kvkeep"], strict=True))
    return {
        "first": next(iter(processes)),
        "ratio": round(
            statistics.median(
                ours["tokens_per_second"] / plain["tokens_per_second"] for plain, ours in pairs
            ),
            3,
        ),
        # Medians of steps, which other work on the machine disturbs less than whole turns.
        "ratio_of_steps": round(
            statistics.median(plain["step_ms"] / ours["step_ms"] for plain, ours in pairs), 3
        ),
        "turns": [each for pair in pairs for each in pair],
    }


def _mean(ratios: list[float]) -> dict[str, float | None]:
    """Geometric mean over launches, and Student's 95 % interval of it."""
    logs = [math.log(each) for each in ratios]
    mean, far = statistics.mean(logs), None
    if len(logs) > 1:
        far = float(student.ppf(0.975, len(logs) - 1)) * statistics.stdev(logs) / math.sqrt(len(logs))
    low, high = (None, None) if far is None else (mean - far, mean + far)
    return {
        "value": round(math.exp(mean), 3),
        "low": None if low is None else round(math.exp(low), 3),
        "high": None if high is None else round(math.exp(high), 3),
    }


class Process:
    """An engine in a process of its own, which waits for its turns.

    Parameters
    ----------
    model
        Folder.
    block_size
        Slots of a block.
    case
        One of :data:`CASES`.
    setting
        Of kvkeep; ``None`` for plain vLLM.
    """

    def __init__(
        self, model: str, block_size: int, case: dict[str, Any], setting: dict[str, Any] | None
    ) -> None:
        self._answer = case["answer"]
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, model, block_size, case, setting))
        self._process.start()
        theirs.close()  # so that a process that dies ends our waiting

    def ready(self) -> None:
        """Wait until the engine is up."""
        self._pipe.recv()

    def turn(self, answer: int | None = None) -> dict[str, Any]:
        """One turn of answers of so many tokens (``None``: the case's own): what it took."""
        self._pipe.send(self._answer if answer is None else answer)
        return dict(self._pipe.recv())

    def close(self) -> None:
        """End the process."""
        self._pipe.send(0)
        self._process.join()


def _serve(
    pipe: Connection, model: str, block_size: int, case: dict[str, Any], setting: dict[str, Any] | None
) -> None:
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        distributed_executor_backend="uni",
        skip_tokenizer_init=True,
        max_model_len=case["prompt"] + case["answer"] + block_size,
        block_size=block_size,
        max_num_seqs=case["requests"],
        num_gpu_blocks_override=case["blocks"],
        enable_prefix_caching=False,
        seed=0,
        **({} if setting is None else {"additional_config": {"kvkeep": setting}}),
    )
    draw = random.Random(0)
    vocabulary = engine.model_config.get_vocab_size()
    prompts = [
        {"prompt_token_ids": [draw.randrange(5, vocabulary) for _ in range(case["prompt"])]}
        for _ in range(case["requests"])
    ]
    pipe.send("ready")
    while answer := pipe.recv():
        sampling = SamplingParams(temperature=0, max_tokens=answer, detokenize=False, ignore_eos=True)
        watch = Watch(engine)
        begin = time.perf_counter()
        done = engine.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - begin
        tokens = sum(len(each.outputs[0].token_ids) for each in done)
        rate = {"seconds": round(seconds, 2), "tokens_per_second": round(tokens / seconds, 2)}
        pipe.send({**rate, **watch.close()})


class Watch:
    """Times of steps; requests at once, use of the pool and preemptions, read from the scheduler at each.

    vLLM's own counter counts a preemption when the request goes on, which may be after the last reading.
    """

    def __init__(self, engine: Any) -> None:
        self._core = engine.llm_engine.engine_core.engine_core
        self._step, self.running, self.usage = self._core.step_fn, 0, 0.0
        self._preempted: dict[str, int] = {}
        self._seconds: list[float] = []
        self._core.step_fn = self._watched

    def _watched(self) -> Any:
        begin = time.perf_counter()
        result = self._step()
        self._seconds.append(time.perf_counter() - begin)
        scheduler = self._core.scheduler
        self.running = max(self.running, len(scheduler.running))
        self.usage = max(self.usage, scheduler.kv_cache_manager.usage)
        for name, request in scheduler.requests.items():
            if request.num_preemptions:
                self._preempted[name] = request.num_preemptions
        return result

    def close(self) -> dict[str, Any]:
        """What was seen."""
        self._core.step_fn = self._step
        tenths = statistics.quantiles(self._seconds, n=10)
        return {
            "step_ms": round(1000 * tenths[4], 3),
            "fast_step_ms": round(1000 * tenths[0], 3),
            "preemptions": sum(self._preempted.values()),
            "most_running": self.running,
            "peak_usage": round(self.usage, 3),
        }


if __name__ == "__main__":
    main()
