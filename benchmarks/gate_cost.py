"""What retention gates add to a decode step: the same policy with gates, and with gates that compute nothing.

python benchmarks/gate_cost.py --model FOLDER [--batch 1,8] [--out FILE.md]
python benchmarks/gate_cost.py --shape qwen3-4b --layers 2 --vocabulary 1024

The arms take turns at every step. Time is the process's own on the processor, with one thread: other work on
the machine falls into it only as far as it spoils caches and memory. Steps repeat with the eviction period; a
step's time is the median (or the least) over periods of the step at that place, and the mean over the places.
With --layers a model of random weights has only so many of its layers, and with a small vocabulary next to no
output layer: then the share is that of one layer, an upper bound of the whole model's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
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
from kvkeep.engine.spec import model_spec
from kvkeep.gates import GateShape, RetentionGates

READ = 16
SINGLY = ", token by token"


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
        found |= {kind: gates, f"{kind}{SINGLY}": gates}
    period = policy.buffer
    arms = [PolicyArm(model, scene, period, policy, gates=gates, name=name) for name, gates in found.items()]
    seconds = take_turns(arms, period, settings.rounds)
    weights, rows = step_weight_bytes(model), []
    medians, least = (
        {name: summary(each) for name, each in seconds.items()} for summary in (_median, _least)
    )
    for name, gates in found.items():
        size = 0 if name == "none" else sum(4 * each.numel() for each in gates.parameters())
        more = [f"{100 * (times[name] / times['none'] - 1):+.1f} %" for times in (medians, least)]
        times = [f"{1e3 * medians[name]:.2f}", f"{1e3 * least[name]:.2f}"]
        share = f"{100 * size / weights:.1f} %"
        rows.append([str(batch), name, share, *times, *(more if size else ("", ""))])
        print(" ".join(rows[-1]), flush=True)
    return rows


def take_turns(arms: Sequence[PolicyArm], period: int, rounds: int) -> dict[str, Tensor]:
    """Processor seconds ``[rounds, period]`` of the steps of each arm; a period more comes first."""
    spent: dict[str, list[float]] = {arm.name: [] for arm in arms}
    for arm in arms:
        arm.begin()
        if arm.name.endswith(SINGLY):
            for layer in arm.cache.managed_layers:
                layer.deferred.most = 1
    for step in range((rounds + 1) * period):
        first = step % len(arms)
        for arm in [*arms[first:], *arms[:first]]:
            begin = time.process_time()
            arm.step()
            spent[arm.name].append(time.process_time() - begin)
    return {name: torch.tensor(times).double().view(-1, period)[1:] for name, times in spent.items()}


def _median(seconds: Tensor) -> float:
    return float(seconds.quantile(0.5, dim=0).mean())


def _least(seconds: Tensor) -> float:
    return float(seconds.amin(0).mean())


def page(rows: Sequence[Sequence[str]], facts: Sequence[str]) -> str:
    """The result as Markdown."""
    names = ("batch", "gates", "of the weights", "ms/step", "least", "more", "more, least")
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
        f"{settings.width}; {settings.rounds} periods; processor time, 1 thread",
        "",
        ", ".join(f"{key}: {value}" for key, value in machine.items()),
    ]
    text = page(rows, facts)
    print(text)
    if settings.out is not None:
        settings.out.write_text(text)


if __name__ == "__main__":
    main()
