"""Policies on a real model whose linear layers run in int8, so that a CPU can afford it: docs/results/gsm8k-qwen.md.

    python scripts/gsm8k_int8.py run --model FOLDER --data FOLDER --runs runs/qwen --limit 60 --budget 112
    python scripts/gsm8k_int8.py page --runs runs/qwen

FOLDER of the model is any local folder that ``kvkeep eval --model`` takes. Samples are written, graded and
logged by the functions behind ``kvkeep eval``; `kvkeep compare` and `kvkeep report` read the logs.
"""

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvkeep.cli import loading
from kvkeep.cli.evaluate import make_setup, progress
from kvkeep.cli.options import make_budget, make_policy
from kvkeep.core.policy import Policy
from kvkeep.evaluation.generator import Completion, Job, ModelGenerator
from kvkeep.evaluation.identity import weights_sha256
from kvkeep.evaluation.prompts import prompt_template
from kvkeep.evaluation.runner import Plan, evaluate

#: Name of an arm -> policy and options, in the order in which they run.
ARMS: dict[str, tuple[str, ...]] = {
    "full": ("full",),
    "vase-attnv": ("vase-attnv",),
    "vase-attnv, evict large": ("vase-attnv", "select_by=smallest", "reserve=0"),
    "random": ("random",),
    "snapkv": ("snapkv",),
    "keydiff": ("keydiff",),
}


class Int8Linear(nn.Module):
    """A linear layer in int8: weights per output channel, activations per token.

    ``quantize_dynamic`` of torch has one scale for all activations of a batch: one token with large
    activations (the first of a prompt has them) then rounds those of the others to nothing, and a text
    depends on its neighbours. Here each row is divided by its largest magnitude first, and a row that
    holds 1 and -1 is added, so that the scale is the same for every batch.

    Parameters
    ----------
    linear
        Layer to replace; it can be freed afterwards.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        scales = (weight.abs().amax(1).double() / 127).clamp_min(1e-30)
        zeros = torch.zeros(len(scales), dtype=torch.long)
        packed = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
        self.packed = torch.ops.quantized.linear_prepack(packed, None)
        self.bias = None if linear.bias is None else linear.bias.detach().float()
        ends = torch.zeros(1, linear.in_features)
        ends[0, 0], ends[0, 1] = 1, -1
        self.register_buffer("ends", ends, persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Float32 ``[..., in_features]`` to float32 ``[..., out_features]``."""
        rows = inputs.reshape(-1, inputs.shape[-1])
        sizes = rows.abs().amax(-1, keepdim=True).clamp_min(1e-30)
        # True: 7 bits for activations, because sums of two products overflow 16 bits with 8 on AVX2.
        made = torch.ops.quantized.linear_dynamic(torch.cat([rows / sizes, self.ends]), self.packed, True)
        outputs = made[:-1] * sizes
        if self.bias is not None:
            outputs = outputs + self.bias
        return outputs.reshape(*inputs.shape[:-1], -1)


def to_int8(model: nn.Module) -> int:
    """Replace all linear layers of a model in place, one after another; return how many there were."""
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear)
    ]
    for parent, name, child in found:
        setattr(parent, name, Int8Linear(child))
        child.weight = nn.Parameter(torch.empty(0), requires_grad=False)  # free it now
    return len(found)


class Int8Generator(ModelGenerator):
    """A generator that turns the linear layers of its model into int8; hash and header tell both.

    Parameters
    ----------
    model, tokenizer, options
        As for :class:`~kvkeep.evaluation.generator.ModelGenerator`.
    source
        Where the weights came from, for the header.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any, *, source: Mapping[str, Any], **options: Any
    ) -> None:
        super().__init__(model, tokenizer, **options)
        self._weights = weights_sha256(model)  # of the float weights: packed ones have no bytes to hash
        self._source = dict(source)
        self._count = to_int8(model)

    def facts(self) -> dict[str, Any]:
        """As for any model, and that its linear layers are int8."""
        facts = super().facts()
        facts["extra"] |= {
            "linears": f"{self._count} in int8: weights per output channel, activations per token (7 bits)",
            "model_sha256_of": "the float32 weights before they were made int8",
            "source": self._source,
        }
        return facts


def by_length(generator: ModelGenerator, size: int, parts: Sequence[Sequence[Job]]) -> Iterator[Completion]:
    """Write all jobs in batches of so many with questions of like length: less padding."""
    jobs = sorted(
        (job for part in parts for job in part), key=lambda job: generator.count_tokens(job.problem.question)
    )
    for start in range(0, len(jobs), size):
        yield from generator.generate(jobs[start : start + size])


def slug(arm: str) -> str:
    """The name of an arm as a folder."""
    return arm.replace(", ", "-").replace(" ", "-")


def make(arm: str, given: argparse.Namespace) -> Policy:
    """Build the policy of an arm."""
    name, *options = ARMS[arm]
    if name == "full":
        return make_policy(name, None)
    amount = make_budget(given.budget, None, None, given.prompt_mode)
    return make_policy(name, amount, buffer=given.buffer, options=list(options))


def load(given: argparse.Namespace) -> tuple[Any, ModelGenerator]:
    """Load the model and say what it is to do."""
    overrides = {"temperature": given.temperature, "max_new": given.max_new_tokens}
    setup = make_setup(
        task="gsm8k",
        data=given.data,
        model=given.model,
        policy=make("full", given),
        preset=given.preset,
        overrides=overrides,
        threads=given.threads,
    )
    loaded = loading.load_model(
        setup.model, dtype="float32", attention="sdpa", device="cpu", threads=given.threads
    )
    notes = Path(setup.model) / "source.json"
    options: dict[str, Any] = {
        "name": Path(setup.model).name,
        "policy": setup.policy,
        "template": prompt_template(setup.make_task().template),
        "sampling": setup.sampling(setup.make_task()),
    }
    if given.float32:
        return setup, ModelGenerator(loaded.model, loaded.tokenizer, **options)
    source = json.loads(notes.read_text()) if notes.exists() else {}
    return setup, Int8Generator(loaded.model, loaded.tokenizer, source=source, **options)


def run(given: argparse.Namespace) -> None:
    """Run the arms one after another with one loaded model; what is complete is not run again."""
    started = time.perf_counter()
    setup, generator = load(given)
    sys.stderr.write(f"loaded in {time.perf_counter() - started:.0f} s\n")
    for arm in given.arms or ARMS:
        started = time.perf_counter()
        mine = generator.with_policy(make(arm, given))
        with progress() as show:
            done = evaluate(
                setup.make_task(),
                mine,
                given.runs / slug(arm),
                Plan(limit=given.limit, batch_size=given.limit),  # regrouped by length
                resume=True,
                command=sys.argv,
                request=setup.request(),
                on_progress=show,
                batches=partial(by_length, mine, given.batch),
            )
        right = sum(sample.correct for sample in done.samples)
        sys.stderr.write(
            f"{arm}: {right} of {len(done.samples)} right at {done.mean_cache:.1f} entries, "
            f"{time.perf_counter() - started:.0f} s\n"
        )


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs/qwen"))
    parser.add_argument("--limit", type=int, default=60)
    parser.add_argument("--budget", type=int, default=112)
    parser.add_argument("--prompt-mode", default="counts")
    parser.add_argument("--buffer", type=int, default=16)
    parser.add_argument("--batch", type=int, default=30)
    parser.add_argument("--preset", default="greedy")
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--max-new-tokens", type=int, default=400)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--arms", nargs="*", choices=ARMS, help="only these arms")
    parser.add_argument("--float32", action="store_true", help="leave the linear layers as they are")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
