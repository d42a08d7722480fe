"""Policies on a real model with int8 linear layers, so that a CPU can afford it: docs/results/gsm8k-qwen.md.

    python scripts/gsm8k_int8.py run --model FOLDER --data FOLDER --runs runs/qwen --budget 128
    python scripts/gsm8k_int8.py agree --model FOLDER --runs runs/qwen

FOLDER of the model is any local folder that ``kvkeep eval --model`` takes. Samples are written, graded and
logged by the functions behind ``kvkeep eval``: ``kvkeep compare`` and ``kvkeep report`` read the logs.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from int8_linear import to_int8
from torch import Tensor, nn
from torch.ao.quantization import per_channel_dynamic_qconfig, quantize_dynamic
from transformers import PreTrainedModel

from kvkeep.cli import loading
from kvkeep.cli.evaluate import make_setup
from kvkeep.cli.options import make_budget, make_policy
from kvkeep.core.policy import Policy
from kvkeep.evaluation.generator import ModelGenerator
from kvkeep.evaluation.identity import weights_sha256
from kvkeep.evaluation.jobs import Completion, Job
from kvkeep.evaluation.prompts import prompt_template
from kvkeep.evaluation.runlog import read_log
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


class Pause(Exception):
    """The batch of this round is written; the log waits for the next round."""


def one_batch(generator: ModelGenerator, parts: Sequence[Sequence[Job]]) -> Iterator[Completion]:
    """Write the first batch that is missing, and stop there if more are missing."""
    yield from generator.generate(parts[0])
    if len(parts) > 1:
        raise Pause


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
    """Write a batch of every arm, then the next: arms have the same problems whenever it is stopped.

    Arms that are complete are left alone, and an unfinished batch is written again.
    """
    started = time.perf_counter()
    setup, generator = load(given)
    sys.stderr.write(f"loaded in {time.perf_counter() - started:.0f} s\n")
    for _ in range(-(-given.limit // given.batch)):
        for arm in given.arms or ARMS:
            folder, started = given.runs / slug(arm), time.process_time()
            if (folder / "run.jsonl").exists() and read_log(folder).footer is not None:
                continue
            mine = generator.with_policy(make(arm, given))
            with suppress(Pause):
                evaluate(
                    setup.make_task(),
                    mine,
                    folder,
                    Plan(limit=given.limit, batch_size=given.batch),
                    resume=True,
                    command=sys.argv,
                    request=setup.request(),
                    batches=partial(one_batch, mine),
                )
            done = read_log(folder).run
            right = sum(sample.correct for sample in done.samples)
            sys.stderr.write(
                f"{arm}: {right} of {len(done.samples)} right at {done.mean_cache:.1f} entries, "
                f"{time.process_time() - started:.0f} s of CPU\n"
            )


def agree(given: argparse.Namespace) -> None:
    """Write down how far int8 is from float32 on texts of the full cache: runs/agree.json."""
    loaded = loading.load_model(given.model, dtype="float32", attention="sdpa", device="cpu", threads=1)
    texts = [sample.extra["text"] for sample in read_log(given.runs / "full").run.samples[: given.texts]]
    asked = loaded.tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
    real = asked["attention_mask"][:, 1:].bool()

    @torch.inference_mode()
    def predict(model: nn.Module) -> Tensor:
        return model(**asked).logits[:, :-1][real].log_softmax(-1)

    def distance(name: str, found: Tensor) -> dict[str, Any]:
        nll = -found.gather(1, asked["input_ids"][:, 1:][real][:, None]).mean()
        kl = (exact.exp() * (exact - found)).sum(-1).mean()
        same = (exact.argmax(-1) == found.argmax(-1)).float().mean()
        return {"linears": name, "same_choice": same.item(), "kl": kl.item(), "nll": nll.item()}

    exact = predict(loaded.model)
    rows = [distance("float32", exact)]
    torch_int8 = quantize_dynamic(loaded.model, {nn.Linear: per_channel_dynamic_qconfig})
    rows.append(distance("int8 of torch (`quantize_dynamic`, per channel)", predict(torch_int8)))
    del torch_int8
    to_int8(loaded.model)
    rows.append(distance("int8 of this page (per channel and token)", predict(loaded.model)))
    result = {"tokens": int(real.sum()), "texts": len(texts), "rows": rows}
    (given.runs / "agree.json").write_text(json.dumps(result, indent=2) + "\n")
    sys.stdout.write(json.dumps(result, indent=2) + "\n")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("run", "agree"))
    parser.add_argument("--model")
    parser.add_argument("--data")
    parser.add_argument("--runs", type=Path, default=Path("runs/qwen"))
    parser.add_argument("--limit", type=int, default=60)
    parser.add_argument("--budget", type=int, default=128)
    parser.add_argument("--prompt-mode", default="counts")
    parser.add_argument("--buffer", type=int, default=16)
    parser.add_argument("--batch", type=int, default=15)
    parser.add_argument("--preset", default="greedy")
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--max-new-tokens", type=int, default=400)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--arms", nargs="*", choices=ARMS, help="only these arms")
    parser.add_argument("--float32", action="store_true", help="leave the linear layers as they are")
    parser.add_argument("--texts", type=int, default=3, help="texts to compare int8 with float32 on")
    given = parser.parse_args()
    {"run": run, "agree": agree}[given.what](given)


if __name__ == "__main__":
    main()
