"""What retention gates add to a decode step: the same policy with gates, and with gates that compute nothing.

python benchmarks/gate_cost.py --model FOLDER [--batch 1,8] [--out FILE.md]
python benchmarks/gate_cost.py --shape qwen3-4b --layers 2 --vocabulary 1024

The arms take turns, round by round. Time is the process's own on the processor, with one thread: other work
on the machine falls into it only as far as it spoils caches and memory. With --layers a model of random
weights has only so many of its layers, and with a small vocabulary next to no output layer: then the share is
that of one layer, an upper bound of the whole model's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import kvkeep
from kvkeep.benchmarking.arms import PolicyArm, Scene
from kvkeep.benchmarking.memory import PeakMemory
from kvkeep.benchmarking.models import SHAPES, random_prompt, step_weight_bytes
from kvkeep.benchmarking.report import describe_machine
from kvkeep.benchmarking.timing import Clock, Spread, alternate
from kvkeep.engine.spec import model_spec
from kvkeep.gates import GateShape, RetentionGates

READ = 16


class ProcessorClock(Clock):
    """Seconds that the process computes."""

    def measure(self, call: Callable[[], object]) -> float:
        """Run ``call`` once."""
        begin = time.process_time()
        call()
        return time.process_time() - begin


class NoGates:
    """Says that every token is needed for ever, at no cost."""

    def __init__(self, heads: int) -> None:
        self.heads = heads

    def __call__(self, layer: int, hidden: Tensor) -> Tensor:
        """Log beta ``[batch, kv_heads, tokens]``."""
        return torch.zeros(1).expand(hidden.shape[0], self.heads, hidden.shape[1])

    def check(self, spec: Any) -> list[str]:
        """They fit everywhere."""
        return []


def load(model: str | None, shape: str, layers: int | None, vocabulary: int | None) -> PreTrainedModel:
    """The model, or random weights of a shape or of a part of it."""
    if model is not None:
        return AutoModelForCausalLM.from_pretrained(Path(model).expanduser(), dtype=torch.float32).eval()
    kind, changes = SHAPES[shape]
    changes = changes | ({} if layers is None else {"num_hidden_layers": layers})
    changes = changes | ({} if vocabulary is None else {"vocab_size": vocabulary})
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(kind(**changes), dtype=torch.float32).eval()


def measure(model: PreTrainedModel, batch: int, settings: argparse.Namespace) -> list[list[str]]:
    """Rows of the table for one batch."""
    spec = model_spec(model.config)
    prompt = random_prompt(model, batch, READ, 0)
    scene = Scene(prompt=prompt, context=4 * settings.budget, seed=0, peak=PeakMemory(prompt.device))
    policy = kvkeep.policy("trimkv", budget=settings.budget, buffer=settings.buffer)
    torch.manual_seed(0)
    found: dict[str, Any] = {"none": NoGates(spec.kv_heads)}
    for kind in ("rg", "rg10"):
        gates = RetentionGates(GateShape.of(spec, kind, width=settings.width)).eval().requires_grad_(False)
        found[kind] = gates
    steps = -(-settings.steps // policy.buffer) * policy.buffer
    arms = [PolicyArm(model, scene, steps, policy, gates=gates, name=name) for name, gates in found.items()]
    timeline = alternate(arms, rounds=settings.rounds, clock=ProcessorClock(model.device))
    rows = []
    weights = step_weight_bytes(model)
    for name, gates in found.items():
        ms = [1e3 * seconds for seconds in timeline.step_seconds(name)]
        more = Spread.of([100 * (ratio - 1) for ratio in timeline.ratios(name, "none")])
        size = 0 if name == "none" else sum(4 * each.numel() for each in gates.parameters())
        cells = [
            str(batch),
            name,
            f"{Spread.of(ms).median:.2f}",
            f"{min(ms):.2f}",
            f"{100 * size / weights:.1f} %",
        ]
        rows.append(
            [*cells, "" if name == "none" else f"{more.median:+.1f} % [{more.low:+.1f}, {more.high:+.1f}]"]
        )
        print(" ".join(rows[-1]), flush=True)
    return rows


def page(rows: Sequence[Sequence[str]], facts: Sequence[str]) -> str:
    """The result as Markdown."""
    names = ("batch", "gates", "ms/step", "least", "of the weights", "more than none, paired")
    lines = [f"| {' | '.join(row)} |" for row in (names, ["---"] * len(names), *rows)]
    return "\n".join([*facts, "", *lines, ""])


def main() -> None:
    """Measure and print."""
    read = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    read.add_argument("--model")
    read.add_argument("--shape", choices=sorted(SHAPES), default="smollm2-135m")
    read.add_argument("--layers", type=int)
    read.add_argument("--vocabulary", type=int)
    read.add_argument("--batch", default="1,8")
    read.add_argument("--budget", type=int, default=512)
    read.add_argument("--buffer", type=int, default=32)
    read.add_argument("--width", type=int, default=512)
    read.add_argument("--steps", type=int, default=32)
    read.add_argument("--rounds", type=int, default=9)
    read.add_argument("--out", type=Path)
    settings = read.parse_args()
    torch.set_num_threads(1)
    model = load(settings.model, settings.shape, settings.layers, settings.vocabulary)
    rows = [row for batch in settings.batch.split(",") for row in measure(model, int(batch), settings)]
    name = "the model" if settings.model else settings.shape
    part = "" if settings.layers is None else f", {settings.layers} layers"
    part += "" if settings.vocabulary is None else f", vocabulary {settings.vocabulary}"
    machine = describe_machine(model)
    facts = [
        f"{name}{part}; trimkv, budget {settings.budget}, buffer {settings.buffer}; gates of width "
        f"{settings.width}; {settings.rounds} rounds of {settings.steps} steps; processor time, 1 thread",
        "",
        ", ".join(f"{key}: {value}" for key, value in machine.items()),
    ]
    text = page(rows, facts)
    print(text)
    if settings.out is not None:
        settings.out.write_text(text)


if __name__ == "__main__":
    main()
