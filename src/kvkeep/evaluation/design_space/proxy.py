"""The internal number of the study: how well right answers are predicted under a policy, teacher-forced."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvkeep.core.budget import Budget
from kvkeep.evaluation.design_space.mechanisms import Arm
from kvkeep.evaluation.likelihood import read_windows
from kvkeep.evaluation.tasks.base import Task

#: Texts that are read.
TEXTS = 48
_RESAMPLES = 2000


@dataclass(frozen=True, kw_only=True)
class Nats:
    """Mean of ``-log p`` over the tokens of each answer, in the order of the texts."""

    per_text: tuple[float, ...]


def nats(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: Task, arm: Arm) -> Nats | None:
    """Read texts of the training part, prompt and right answer, under an arm.

    Everything counts towards a budget that is larger by the mean prompt, so that an answer is read with about
    as many entries as it is written with. All texts are cut to the length of the shortest.

    Returns
    -------
    Nats or None
        ``None`` where reading a given text says nothing about a mechanism: one of decoding, one whose
        evictions do not follow the clock, or one that keeps the prompt whatever the budget says.

    Raises
    ------
    ConfigError
        If the task has no training texts.
    """
    policy, precision = arm.policy, arm.precision
    counted = _counting(policy, policy.amount.count)
    by_clock = policy.traits.trigger.decode in ("periodic", "slack", "clock")
    # One that protects the prompt of its own accord would keep all of a text that is only read.
    if arm.sampling or not by_clock or counted.protects_prompt:
        return None
    texts = [task.training_text(number) for number in range(TEXTS)]
    prompts = [len(_encode(tokenizer, prompt)) for prompt, _ in texts]
    whole = [_encode(tokenizer, prompt + answer) for prompt, answer in texts]
    length = min(map(len, whole))
    kept = round(float(np.mean(prompts))) if policy.protects_prompt else 0
    counted = counted.with_budget(policy.amount.count + kept)
    if precision is not None:
        # A text that is only read is all prompt: the part in full grows by the mean one.
        precision = precision.settled(buffer=policy.buffer, budget=policy.amount.count)
        grown = kept if precision.prompt == "full" else 0
        precision = replace(precision, prompt="few", reserve=(precision.reserve or 0) + grown)
    windows = torch.tensor([tokens[:length] for tokens in whole])
    read = read_windows(model, counted, windows, chunk=policy.buffer, precision=precision)
    # Chunks that hold a piece of the prompt tell nothing of the answer.
    return Nats(
        per_text=tuple(
            _mean(*score.part(-(-prompt // policy.buffer)))
            for score, prompt in zip(read, prompts, strict=True)
        )
    )


def _counting(policy: Any, entries: int) -> Any:
    """The policy with a budget that counts everything, evicting while it reads."""
    base = getattr(policy, "base", None)
    if base is not None:
        return replace(policy, base=_counting(base, entries))
    return replace(policy, budget=Budget(entries=entries), prefill="chunk")


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text)["input_ids"])


def _mean(nats: float, tokens: int) -> float:
    return nats / tokens if tokens else float("nan")


def change(pair: tuple[Nats, Nats], seed: int = 0) -> tuple[float, tuple[float, float]]:
    """Challenger minus baseline in nats a token, with its 95 % interval over texts."""
    difference = np.subtract(pair[1].per_text, pair[0].per_text)
    difference = difference[np.isfinite(difference)]
    draws = np.random.default_rng(seed).integers(0, len(difference), (_RESAMPLES, len(difference)))
    low, high = np.quantile(difference[draws].mean(-1), (0.025, 0.975))
    return float(difference.mean()), (float(low), float(high))
