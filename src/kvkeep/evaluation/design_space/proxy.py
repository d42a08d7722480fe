"""The internal number of the study: how well right answers are predicted under a policy, teacher-forced."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvkeep.core.budget import Budget
from kvkeep.core.errors import ConfigError
from kvkeep.evaluation.design_space.mechanisms import Arm
from kvkeep.evaluation.likelihood import read_windows
from kvkeep.evaluation.tasks.base import Task

#: Texts that are read.
TEXTS = 48
_RESAMPLES = 2000


@dataclass(frozen=True, kw_only=True)
class Nats:
    """``-log p`` of the tokens of some texts.

    Parameters
    ----------
    per_token
        Of each text, its tokens from the second on.
    starts
        Where in each of these lists the first whole chunk of the answer begins.
    """

    per_token: tuple[tuple[float, ...], ...]
    starts: tuple[int, ...]

    def as_json(self) -> str:
        """As text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Nats | None:
        """What :meth:`as_json` wrote; ``None`` of what earlier versions wrote, one number a text."""
        found = json.loads(text)
        if not isinstance(found, dict):
            return None
        return cls(per_token=tuple(map(tuple, found["per_token"])), starts=tuple(found["starts"]))


def nats(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: Task, arm: Arm) -> Nats | None:
    """Read texts of the training part, prompt and right answer, under an arm.

    Everything counts towards a budget that is larger by the mean prompt, so that an answer is read with about
    as many entries as it is written with. All texts are cut to the length of the shortest.

    Returns
    -------
    Nats or None
        ``None`` where reading a given text says nothing about a mechanism: one of decoding, one whose
        evictions do not follow the clock, or one that keeps the prompt whatever the budget says; and where
        the task has no training texts.
    """
    policy, precision = arm.policy, arm.precision
    counted = _counting(policy, policy.amount.count)
    by_clock = policy.traits.trigger.decode in ("periodic", "slack", "clock")
    # One that protects the prompt of its own accord would keep all of a text that is only read.
    if arm.sampling or not by_clock or counted.protects_prompt:
        return None
    try:
        texts = [task.training_text(number) for number in range(TEXTS)]
    except ConfigError:  # most tasks have only problems that measure; their study is one number poorer
        return None
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
    losses: list[torch.Tensor] = []
    read_windows(
        model,
        counted,
        windows,
        chunk=policy.buffer,
        precision=precision,
        on_losses=lambda each: losses.append(each.cpu()),
    )
    return Nats(
        per_token=tuple(tuple(round(each, 5) for each in row) for row in torch.cat(losses, 1).tolist()),
        # Chunks that hold a piece of the prompt tell nothing of the answer.
        starts=tuple(-(-prompt // policy.buffer) * policy.buffer for prompt in prompts),
    )


def _counting(policy: Any, entries: int) -> Any:
    """The policy with a budget that counts everything, evicting while it reads."""
    base = getattr(policy, "base", None)
    if base is not None:
        return replace(policy, base=_counting(base, entries))
    return replace(policy, budget=Budget(entries=entries), prefill="chunk")


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text)["input_ids"])


def change(pair: tuple[Nats, Nats], seed: int = 0) -> tuple[float, tuple[float, float]] | None:
    """Challenger minus baseline in nats a token, with its 95 % interval over texts.

    Both are taken over the same tokens. An arm that evicts rarely reads in longer chunks, and its first whole
    one begins later: over all that each has, early tokens of one would be held against late ones of another.

    Returns
    -------
    tuple or None
        ``None`` if no text has such a token.
    """
    baseline, challenger = pair
    means = []
    for ours, theirs, *starts in zip(
        challenger.per_token, baseline.per_token, challenger.starts, baseline.starts, strict=True
    ):
        start = max(starts)
        if start < len(ours):
            means.append(float(np.subtract(ours[start:], theirs[start:]).mean()))
    if not means:
        return None
    difference = np.array(means)
    draws = np.random.default_rng(seed).integers(0, len(difference), (_RESAMPLES, len(difference)))
    low, high = np.quantile(difference[draws].mean(-1), (0.025, 0.975))
    return float(difference.mean()), (float(low), float(high))
