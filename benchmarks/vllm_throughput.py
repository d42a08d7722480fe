"""Tokens per second of plain vLLM and of vLLM with kvkeep, in one process, turn by turn.

    python benchmarks/vllm_throughput.py equal-memory --model FOLDER --out FILE
    python benchmarks/vllm_throughput.py equal-batch --model FOLDER --out FILE
    python benchmarks/vllm_throughput.py no-eviction --model FOLDER --out FILE

``equal-memory``: a pool that is too small for the full lengths, so that plain vLLM queues or preempts.
``equal-batch``: memory for everybody. ``no-eviction``: a budget above every length, where kvkeep must cost
nothing. Both engines live in this process and take turns, so that what else the machine does hits both.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

#: Requests, tokens of a prompt and of an answer, blocks of the pool (None: enough), budget, buffer.
CASES: dict[str, dict[str, Any]] = {
    "equal-memory": {"requests": 12, "prompt": 64, "answer": 448, "blocks": 25, "budget": 96, "buffer": 32},
    "equal-batch": {"requests": 8, "prompt": 1024, "answer": 128, "blocks": None, "budget": 96, "buffer": 32},
    "no-eviction": {"requests": 8, "prompt": 64, "answer": 192, "blocks": None, "budget": 1024, "buffer": 32},
}


def main() -> None:
    """Run one case; print a JSON line per turn and write the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("case", choices=sorted(CASES))
    parser.add_argument("--model", required=True)
    parser.add_argument("--policy", default="vase-dkv")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--first", choices=("plain", "kvkeep"), default="plain", help="built and timed first")
    parser.add_argument("--block-size", type=int, default=32)
    for name in ("requests", "prompt", "answer", "blocks", "budget", "buffer"):
        parser.add_argument(f"--{name}", type=int, default=None, help="instead of the case's own")
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    case = {
        key: value if getattr(given, key) is None else getattr(given, key)
        for key, value in CASES[given.case].items()
    }
    from vllm import LLM, SamplingParams

    common = {
        "model": given.model,
        "dtype": "float32",
        "enforce_eager": True,
        "distributed_executor_backend": "uni",
        "skip_tokenizer_init": True,
        "max_model_len": case["prompt"] + case["answer"] + given.block_size,
        "block_size": given.block_size,
        "max_num_seqs": case["requests"],
        "num_gpu_blocks_override": case["blocks"],
        "enable_prefix_caching": False,
        "seed": 0,
    }
    setting = {"policy": given.policy, "budget": case["budget"], "buffer": case["buffer"]}
    extra = {"plain": {}, "kvkeep": {"additional_config": {"kvkeep": setting}}}
    order = sorted(extra, key=lambda name: name != given.first)
    engines = {name: LLM(**common, **extra[name]) for name in order}
    vocabulary = engines["plain"].model_config.get_vocab_size()
    draw = random.Random(0)
    prompts = [
        {"prompt_token_ids": [draw.randrange(5, vocabulary) for _ in range(case["prompt"])]}
        for _ in range(case["requests"])
    ]
    sampling = SamplingParams(temperature=0, max_tokens=case["answer"], detokenize=False, ignore_eos=True)
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
    for turn in range(given.rounds):
        # No arm always has the better place in a turn. Which is built first matters more: see --first.
        for name, engine in list(engines.items())[:: 1 if turn % 2 == 0 else -1]:
            watch = Watch(engine)
            begin = time.perf_counter()
            done = engine.generate(prompts, sampling, use_tqdm=False)
            seconds = time.perf_counter() - begin
            tokens = sum(len(each.outputs[0].token_ids) for each in done)
            turns[name].append(
                {
                    "turn": turn,
                    "arm": name,
                    "seconds": round(seconds, 2),
                    "tokens_per_second": round(tokens / seconds, 2),
                    **watch.close(),
                }
            )
            sys.stderr.write(json.dumps(turns[name][-1]) + "\n")
    ratios = [
        ours["tokens_per_second"] / plain["tokens_per_second"]
        for plain, ours in zip(turns["plain"], turns["kvkeep"], strict=True)
    ]
    summary = {
        "case": given.case,
        **case,
        "policy": given.policy,
        "model": Path(given.model).name,
        "ratios": [round(each, 3) for each in ratios],
        "median_ratio": round(statistics.median(ratios), 3),
        "first": given.first,
        "turns": [each for pair in zip(*turns.values(), strict=True) for each in pair],
    }
    print(json.dumps({key: value for key, value in summary.items() if key != "turns"}))
    if given.out is not None:
        given.out.write_text(json.dumps(summary, indent=1) + "\n")


class Watch:
    """Requests at once, use of the pool and preemptions, read from the scheduler at every step.

    vLLM's own counter counts a preemption when the request goes on, which may be after the last reading.
    """

    def __init__(self, engine: Any) -> None:
        self._core = engine.llm_engine.engine_core.engine_core
        self._step, self.running, self.usage = self._core.step_fn, 0, 0.0
        self._preempted: dict[str, int] = {}
        self._core.step_fn = self._watched

    def _watched(self) -> Any:
        result = self._step()
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
        return {
            "preemptions": sum(self._preempted.values()),
            "most_running": self.running,
            "peak_usage": round(self.usage, 3),
        }


if __name__ == "__main__":
    main()
