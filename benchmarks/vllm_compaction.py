"""Time of one eviction of one layer inside vLLM's blocks, and the floor that memory sets.

    python benchmarks/vllm_compaction.py --rows 8 --budget 1024 --buffer 128 --kv-heads 8 --dim 128

Needs vLLM for its write kernel (the layout of a page is learned from it). One thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from vllm import _custom_ops as ops

from kvkeep.policies.compose import policy as make_policy
from kvkeep.serving.compaction import Compaction
from kvkeep.serving.deployment import queries_per_block
from kvkeep.serving.heads import EqualHeads, UnequalHeads
from kvkeep.serving.layout import Layout
from kvkeep.serving.pages import LayerPages
from kvkeep.serving.rounds import RoundPlanner
from kvkeep.serving.schedule import Schedule


@dataclass
class Deployment:
    """As much of a deployment as an eviction reads."""

    policy: Any
    settings: Any
    statistics: Any = None
    rope: Any = None


@dataclass
class Settings:
    """The seed of the draws."""

    seed: int = 0


def main() -> None:
    """Print one JSON line per policy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name, value in (("rows", 8), ("budget", 1024), ("buffer", 128), ("kv-heads", 8), ("group", 4)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--isa", default="vec")
    parser.add_argument(
        "policies", nargs="*", default=["streaming-llm", "key-norm", "vase-dkv", "vase-attnv", "snapkv"]
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    size, heads = given.block_size, given.kv_heads * given.group

    def write(keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, at: torch.Tensor) -> None:
        key_cache, value_cache = cache.view(1, 1, 2 * size, given.dim).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(
            keys, values, key_cache, value_cache, at, given.isa, kv_cache_dtype="auto"
        )

    layout = Layout.learn(write, slots=size, dim=given.dim, dtype=torch.float32, device=torch.device("cpu"))
    for text in given.policies:
        policy = make_policy(text, budget=given.budget, buffer=given.buffer, prefill="chunk")
        window, ragged = policy.traits.queries, policy.traits.ragged
        per_block = queries_per_block(size, heads, given.kv_heads) if window else 0
        side = -(-window // per_block) if window else 0
        schedule = Schedule(
            budget=given.budget,
            buffer=given.buffer,
            block_size=size,
            side_blocks=side,
            spare=size - 1 if ragged else 0,
        )
        owned = schedule.blocks(0)
        cache = torch.randn(given.rows * owned + 1, given.kv_heads, size, 2 * given.dim)
        pages = LayerPages(cache, layout, heads, per_block)
        holders = UnequalHeads(pages, given.buffer) if ragged else EqualHeads(pages)
        evict = Compaction(Deployment(policy, Settings()), 0, pages, holders, 1.0).evict
        table = (1 + torch.randperm(given.rows * owned)).view(given.rows, owned).int()
        planner = RoundPlanner(schedule, window, per_block, ragged=ragged)
        seconds = []
        for step in range(given.rounds + 1):
            start = torch.full((given.rows,), schedule.first(0) + step * given.buffer).numpy()
            (one,) = planner.plan(start, 0 * start + 1, table)
            begin = time.perf_counter()
            evict(one.cuts)
            seconds.append(time.perf_counter() - begin)
        entries = given.rows * given.kv_heads * (given.budget + given.buffer)
        begin = time.perf_counter()
        cache.clone()
        copied = time.perf_counter() - begin
        median = statistics.median(seconds[1:])
        print(
            json.dumps(
                {
                    "policy": text,
                    "median_ms": round(1e3 * median, 2),
                    "least_ms": round(1e3 * min(seconds[1:]), 2),
                    "us_per_generated_token_and_layer": round(1e6 * median / given.rows / given.buffer, 1),
                    "copy_of_these_blocks_ms": round(1e3 * copied, 2),
                    "entries": entries,
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
