"""Where the time of a decode step goes, and where that of an eviction: by operator, on a CPU.

python benchmarks/profile_decode.py --model FOLDER [--policies vase-attnv,expected-attention] [--out FILE.md]
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, PreTrainedModel

import kvkeep
from kvkeep.engine.generation import cache_argument

SHOWN = 6
ROUNDS = 2


@torch.no_grad()
def operators(model: PreTrainedModel, policy: kvkeep.Policy, batch: int) -> tuple[Counter[str], Counter[str]]:
    """Return CPU microseconds by operator: mean of plain steps, and what a step with an eviction adds."""
    cache = kvkeep.RetentionCache(model, policy)
    argument = {cache_argument(model): cache}
    draw = torch.Generator().manual_seed(0)
    full = policy.amount.count + policy.buffer
    vocabulary = model.config.vocab_size

    def read(tokens: int) -> None:
        model(input_ids=torch.randint(vocabulary, (batch, tokens), generator=draw), **argument)

    def measure(steps: int) -> Counter[str]:
        with profile(activities=[ProfilerActivity.CPU]) as found:
            for _ in range(steps):
                read(1)
        return Counter({each.key: each.self_cpu_time_total / steps for each in found.key_averages()})

    read(full)
    plain: Counter[str] = Counter()
    evicting: Counter[str] = Counter()
    for round_ in range(ROUNDS + 1):  # the first one warms up
        before = cache.trace.evictions
        while cache.trace.evictions == before:
            at_limit = cache.managed_layers[0].store.longest == full - 1
            found = measure(1) if at_limit else Counter()
            if not at_limit:
                read(1)
        middle = measure(16)
        if round_:
            evicting.update({name: time / ROUNDS for name, time in found.items()})
            plain.update({name: time / ROUNDS for name, time in middle.items()})
    evicting.subtract(plain)
    return plain, evicting


def table(title: str, times: Counter[str]) -> list[str]:
    """Return a Markdown table of the largest operators."""
    total = sum(times.values())
    lines = [f"{title}: {total / 1e3:.1f} ms of CPU time", "", "| operator | ms | share |", "|---|---|---|"]
    for name, time in times.most_common(SHOWN):
        lines.append(f"| `{name}` | {time / 1e3:.1f} | {100 * time / total:.0f} % |")
    return [*lines, ""]


def main() -> None:
    """Read the command line, profile and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--policies", default="vase-attnv,expected-attention")
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).eval()
    lines = [
        f"{model.config.model_type}, {model.num_parameters() / 1e6:.0f} M parameters, float32, batch "
        f"{given.batch}, budget {given.budget}, {given.threads} threads, torch {torch.__version__}",
        "",
    ]
    for name in given.policies.split(","):
        policy = kvkeep.policy(name, budget=given.budget)
        plain, evicting = operators(model, policy, given.batch)
        share = sum(evicting.values()) / (sum(evicting.values()) + policy.buffer * sum(plain.values()))
        lines += table(f"{name}, a step without eviction", plain)
        lines += table(f"{name}, what an eviction adds ({100 * share:.1f} % of all time)", evicting)
    text = "\n".join(lines)
    print(text)
    if given.out is not None:
        given.out.write_text(text)


if __name__ == "__main__":
    main()
