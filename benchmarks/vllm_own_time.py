"""How much of a decode step inside vLLM is kvkeep's own code, where nothing is evicted.

    python benchmarks/vllm_own_time.py --model FOLDER --out FILE

Throughput of two processes differs by several percent even if both are plain vLLM, which hides a cost of 1
or 2 %. So this counts directly: time in kvkeep's builder and attention, less that of the stock methods that
they call. The clocks themselves are counted in, so it is an upper bound; what kvkeep's code does to the
caches of the processor is not in it. See vllm_throughput.py for whole turns.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


class Clock:
    """Seconds in a method, all calls since the last reading added up."""

    def __init__(self, owner: Any, name: str) -> None:
        self.seconds = 0.0
        method = getattr(owner, name)

        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            result = method(*args, **kwargs)
            self.seconds += time.perf_counter() - begin
            return result

        setattr(owner, name, timed)

    def take(self) -> float:
        """What was added up."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def main() -> None:
    """Write some answers, reading the clocks after every step; print and write the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--policy", default="vase-dkv")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--answer", type=int, default=256)
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--buffer", type=int, default=32)
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    from vllm import LLM, SamplingParams
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadataBuilder

    from kvkeep.serving.attention import BoundedImpl
    from kvkeep.serving.bounded import BoundedBuilder

    ours = [Clock(BoundedBuilder, "build"), Clock(BoundedImpl, "forward")]
    stock = [
        Clock(CPUAttentionMetadataBuilder, "build"),
        Clock(CPUAttentionBackendImpl, "forward"),
        Clock(CPUAttentionBackendImpl, "do_kv_cache_update"),
    ]
    engine = LLM(
        model=given.model,
        dtype="float32",
        enforce_eager=True,
        distributed_executor_backend="uni",
        skip_tokenizer_init=True,
        max_model_len=given.prompt + given.answer + given.block_size,
        block_size=given.block_size,
        max_num_seqs=given.requests,
        enable_prefix_caching=False,
        seed=0,
        additional_config={
            "kvkeep": {"policy": given.policy, "budget": given.budget, "buffer": given.buffer}
        },
    )
    core = engine.llm_engine.engine_core.engine_core
    step = Clock(core, "step_fn")
    inner, steps = core.step_fn, []

    def read_clocks() -> Any:
        result = inner()
        own = sum(each.take() for each in ours) - sum(each.take() for each in stock)
        steps.append((step.take(), own))
        return result

    core.step_fn = read_clocks
    draw = random.Random(0)
    vocabulary = engine.model_config.get_vocab_size()
    prompts = [
        {"prompt_token_ids": [draw.randrange(5, vocabulary) for _ in range(given.prompt)]}
        for _ in range(given.requests)
    ]
    sampling = SamplingParams(temperature=0, max_tokens=given.answer, detokenize=False, ignore_eos=True)
    for _ in range(given.turns):
        steps.clear()  # of the last turn only: the first ones compile and fill caches
        engine.generate(prompts, sampling, use_tqdm=False)
    summary = {
        "model": Path(given.model).name,
        "policy": given.policy,
        "requests": given.requests,
        "steps": len(steps),
        "step_ms": round(1000 * statistics.median(whole for whole, _ in steps), 3),
        "own_ms": round(1000 * statistics.median(own for _, own in steps), 3),
        "own_percent": round(100 * statistics.median(own / whole for whole, own in steps), 2),
    }
    print(json.dumps(summary))
    if given.out is not None:
        given.out.write_text(json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    main()
