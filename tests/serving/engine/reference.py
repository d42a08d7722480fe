"""The same tokens read by transformers with a kvkeep cache: what vLLM has to agree with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kvkeep.core.policy import Policy
from kvkeep.engine.generation import cache_argument
from kvkeep.engine.retention_cache import RetentionCache
from tests.serving.engine.running import Answer, Positions

#: A difference of log-probabilities that float32 noise does not make.
CLEAR = 1e-3


@dataclass
class Reading:
    """What the reference says to the tokens of an answer.

    Parameters
    ----------
    mismatches
        Written tokens that it would not have written, where it is clear about it.
    log_probabilities
        Of the written tokens.
    held
        Positions held after the last token that was stored.
    """

    mismatches: int
    log_probabilities: list[float]
    held: Positions


def _pieces(policy: Policy, prompt: int, total: int) -> Iterator[int]:
    """Where forwards end: evictions that fall into the prompt end a piece, its rest comes token by token."""
    chunked = policy.traits.trigger.prefill == "chunk"
    kept, position = policy.amount.count, 0
    if not chunked or prompt <= kept:
        yield prompt
        position = prompt
    while chunked and position < prompt:
        cut = max(kept + policy.buffer, position + policy.buffer - (position - kept) % policy.buffer)
        if position < kept + policy.buffer:
            cut = kept + policy.buffer
        position = cut if cut <= prompt else position + 1
        yield position
    yield from range(position + 1, total + 1)


@torch.inference_mode()
def read(model: Any, policy: Policy | None, answer: Answer, calibration: Any = None) -> Reading:
    """Read prompt and answer; without a policy with everything in sight."""
    tokens = torch.tensor([answer.prompt + answer.tokens[:-1]])
    if policy is None:
        logits, held = model(input_ids=tokens).logits[0], []
    else:
        cache = RetentionCache(model, policy, sequence_ids=[answer.name], calibration=calibration)
        name, begin, parts = cache_argument(model), 0, []
        for end in _pieces(policy, len(answer.prompt), tokens.shape[1]):
            parts.append(model(input_ids=tokens[:, begin:end], **{name: cache}).logits[0])
            begin = end
        logits = torch.cat(parts)
        held = [[head.tolist() for head in cache.kept_positions(layer)[0]] for layer in cache.spec.managed]
    chances = logits[len(answer.prompt) - 1 :].float().log_softmax(-1)
    best = chances.topk(2).values
    written = torch.tensor(answer.tokens)
    wrong = (chances.argmax(-1) != written) & (best[:, 0] - best[:, 1] > CLEAR)
    return Reading(int(wrong.sum()), chances.gather(1, written[:, None])[:, 0].tolist(), held)


def overlap(one: Positions, other: Positions) -> float:
    """Share of the entries of one that the other holds too."""
    pairs = [
        (set(mine), set(yours))
        for layers in zip(one, other, strict=True)
        for mine, yours in zip(*layers, strict=True)
    ]
    return sum(len(mine & yours) for mine, yours in pairs) / sum(max(map(len, pair)) for pair in pairs)


def noise(answer: Answer, reading: Reading) -> float:
    """Largest difference of the log-probabilities of written tokens."""
    pairs = zip(answer.log_probabilities, reading.log_probabilities, strict=True)
    return max(abs(mine - its) for mine, its in pairs)
