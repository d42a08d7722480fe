"""Train the tiny reasoner on a CPU: ``python -m kvkeep.testbed.train --out DIR [--resume]``.

The defaults made ``trace-1``, in 23 minutes of one core; the flags that made ``trace-2`` are in its card.

The loss counts chain tokens only, and in the first steps also where four heads look. Programs are short until
their digits come out right, then grow. Data are a function of seed and step, so that a resumed run takes the
same steps as one that was never stopped.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from kvkeep.testbed.curriculum import IGNORED, STAGES, Stage, make_batch, make_rows
from kvkeep.testbed.guidance import guidance_loss, wanted
from kvkeep.testbed.model import Shape, make_model
from kvkeep.testbed.muon import Muon
from kvkeep.testbed.tokenizer import WORDS, make_tokenizer
from kvkeep.testbed.trace_task import kind

COMPUTED = ("c", "w", "o")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that decides the result of a training run.

    Parameters
    ----------
    shape, seed
        The model, and the source of its first weights and of all data.
    steps, decay
        Optimizer steps, and how many of the last ones lower the rates along half a cosine.
    tokens
        Least tokens in a batch, prompts included.
    matrix_rate, rate
        Learning rates of hidden matrices (Muon) and of everything else (AdamW).
    warmup
        First steps, over which the rates rise.
    mastered
        The next stage begins when the running share of right digits reaches this.
    guided, guidance
        First steps in which heads are shown where to look, and the weight of that loss.
    stages
        The curriculum.
    """

    shape: Shape = field(default_factory=Shape)
    seed: int = 0
    steps: int = 3000
    decay: int = 1500
    tokens: int = 2048
    matrix_rate: float = 0.02
    rate: float = 5e-3
    warmup: int = 50
    mastered: float = 0.97
    guided: int = 1200
    guidance: float = 0.3
    stages: tuple[Stage, ...] = STAGES


def rate_scale(config: Config, step: int) -> float:
    """Return the share of the rates at a step: a linear start, a constant, half a cosine at the end."""
    start = min(1.0, (step + 1) / config.warmup)
    done = max(0.0, (step - (config.steps - config.decay)) / config.decay)
    return start * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))


def accuracy_by_kind(logits: Tensor, targets: Tensor) -> dict[str, float]:
    """Return the share of right tokens by kind of word (``L r k c w o``)."""
    wanted = targets[targets != IGNORED]
    right = logits.argmax(-1)[targets != IGNORED] == wanted
    hits: dict[str, list[bool]] = {}
    for target, hit in zip(wanted.tolist(), right.tolist(), strict=True):
        hits.setdefault(kind(WORDS[target]), []).append(hit)
    return {name: sum(found) / len(found) for name, found in sorted(hits.items()) if len(name) == 1}


class Trainer:
    """A model in training; ``progress`` is everything of the state that is neither weight nor optimizer."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.model = make_model(config.shape, config.seed)
        named = dict(self.model.named_parameters())
        hidden = [p for name, p in named.items() if p.ndim == 2 and "embed" not in name]
        others = [p for name, p in named.items() if p.ndim < 2 or "embed" in name]
        self.optimizers = (
            Muon(hidden, lr=config.matrix_rate),
            torch.optim.AdamW(others, lr=config.rate, betas=(0.9, 0.98), weight_decay=0.0),
        )
        self.progress = {"step": 0, "stage": 0, "tokens": 0, "seconds": 0.0, "digits": 0.0}
        self.accuracy: dict[str, float] = {}

    def train_step(self) -> float:
        """Take one step and return its loss."""
        started, now, config = time.perf_counter(), self.progress, self.config
        guided = now["step"] < config.guided
        rows = make_rows(config.stages[int(now["stage"])], config.tokens, config.seed, int(now["step"]))
        ids, targets = make_batch(rows)
        scale = rate_scale(config, int(now["step"]))
        for optimizer, rate in zip(self.optimizers, (config.matrix_rate, config.rate), strict=True):
            optimizer.param_groups[0]["lr"] = rate * scale
        self.model.set_attn_implementation("eager" if guided else "sdpa")
        output = self.model(input_ids=ids[:, :-1], use_cache=False, output_attentions=guided)
        logits = output.logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten(), ignore_index=IGNORED)
        shown = loss
        if guided:
            masks = wanted(rows, ids.shape[1])
            shown = loss + config.guidance * guidance_loss(output.attentions, masks)
        self.model.zero_grad()
        shown.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.accuracy = accuracy_by_kind(logits.detach(), targets[:, 1:])
        digits = sum(self.accuracy.get(name, 1.0) for name in COMPUTED) / len(COMPUTED)
        now["digits"] = 0.95 * now["digits"] + 0.05 * digits
        if now["digits"] > config.mastered and now["stage"] + 1 < len(config.stages):
            now["stage"], now["digits"] = now["stage"] + 1, 0.0
        now["step"] += 1
        now["tokens"] += ids.numel()
        now["seconds"] += time.perf_counter() - started
        return loss.item()

    def save(self, path: Path) -> None:
        """Write a checkpoint; an interrupted write leaves the one before."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "progress": self.progress,
        }
        torch.save(state, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)

    def resume(self, path: Path) -> None:
        """Continue where a checkpoint of the same configuration ended."""
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.progress = state["progress"]

    def export(self, folder: Path) -> None:
        """Write model, tokenizer and configuration as transformers reads them."""
        self.model.save_pretrained(folder)
        make_tokenizer().save_pretrained(folder)
        facts = {"config": asdict(self.config), "progress": self.progress}
        (folder / "training.json").write_text(json.dumps(facts, indent=2) + "\n")


def train(config: Config, folder: Path, *, resume: bool = False, report: Callable[[str], object]) -> Trainer:
    """Train a model, write a checkpoint every two minutes and the model at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    trainer, checkpoint = Trainer(config), folder / "checkpoint.pt"
    if resume and checkpoint.exists():
        trainer.resume(checkpoint)
    report(json.dumps({"parameters": sum(p.numel() for p in trainer.model.parameters()), **asdict(config)}))
    saved = reported = time.monotonic()
    tokens, step = trainer.progress["tokens"], trainer.progress["step"]
    while trainer.progress["step"] < config.steps:
        loss = trainer.train_step()
        now, clock = trainer.progress, time.monotonic()
        if clock - reported > 10 or now["step"] == config.steps:
            rate, left = (now["tokens"] - tokens) / (clock - reported), config.steps - now["step"]
            minutes = left * (clock - reported) / (now["step"] - step) / 60
            kinds = " ".join(f"{name} {share:.3f}" for name, share in trainer.accuracy.items())
            report(
                f"step {now['step']} stage {now['stage']} loss {loss:.3f} | {kinds} | "
                f"digits {now['digits']:.3f} | "
                f"{now['tokens'] / 1e6:.2f} M tokens, {rate:.0f} tokens/s, {minutes:.0f} min left"
            )
            reported, tokens, step = clock, now["tokens"], now["step"]
        if clock - saved > 120:
            trainer.save(checkpoint)
            saved = clock
    trainer.save(checkpoint)
    trainer.export(folder / "model")
    return trainer


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoint and model")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in the folder")
    parser.add_argument("--seed", type=int, default=Config.seed)
    parser.add_argument("--steps", type=int, default=Config.steps)
    parser.add_argument("--decay", type=int, default=Config.decay)
    parser.add_argument("--guided", type=int, default=Config.guided)
    for name in ("layers", "width", "heads", "kv_heads", "head_dim", "feed_forward"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Shape, name))
    given = vars(parser.parse_args())
    folder, resume = given.pop("out"), given.pop("resume")
    run = {name: given.pop(name) for name in ("seed", "steps", "decay", "guided")}

    def report(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    train(Config(shape=Shape(**given), **run), folder, resume=resume, report=report)


if __name__ == "__main__":
    main()
