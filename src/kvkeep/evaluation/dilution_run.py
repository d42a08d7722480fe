"""Measure dilution on a model: the same right text read with the full cache and under a policy.

Both are teacher-forced, so that every query has the same words before it and one error does not bring the
next. The full cache reads all at once; under the policy the continuation is fed token by token on a real
:class:`~kvkeep.RetentionCache`, so that evictions come when they come while writing.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvkeep.core.errors import UnsupportedError
from kvkeep.core.policy import Policy
from kvkeep.engine.generation import cache_argument
from kvkeep.engine.retention_cache import RetentionCache
from kvkeep.evaluation.attention_watch import Watch
from kvkeep.evaluation.dilution import Attention, Retained, attention, retained
from kvkeep.evaluation.evidence import Reading
from kvkeep.policies.full import Full


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One text, read twice. All tensors are ``[layers, heads, queries]`` or ``[queries]``.

    Parameters
    ----------
    id
        Of the problem.
    full, evicted
        Attention with the full cache, and of the run under the policy (its own queries and keys).
    retained
        What the policy's kept entries leave of the full cache's mass, and the mass that the odds form
        predicts from it. In the first layer, whose queries and keys know nothing of evictions, that is the
        measured mass to rounding; above it the inputs of the two runs differ.
    right_full, right_evicted
        Whether the likeliest next token was the right one, bool.
    evidence, distractors
        Entries of the full cache that each query could see.
    mean_cache
        Entries per KV head while the continuation was read, mean over steps, layers and rows of the batch.
    """

    id: str
    full: Attention
    evicted: Attention
    retained: Retained
    right_full: Tensor
    right_evicted: Tensor
    evidence: Tensor
    distractors: Tensor
    mean_cache: float


@dataclass(frozen=True)
class Heard:
    """Logits of one pass: for each row ``[layers, heads, queries, tokens]``, and what was predicted right."""

    logits: list[Tensor]
    right: list[Tensor]
    mean_cache: float


@torch.inference_mode()
def measure(
    model: PreTrainedModel,
    policy: Policy,
    readings: Sequence[Reading],
    *,
    names: Sequence[int] | None = None,
    seed: int = 0,
    calibration: Any = None,
    gates: Any = None,
) -> list[Measured]:
    """Read some texts, as one batch, with the full cache and under a policy.

    Parameters
    ----------
    names, seed, calibration, gates
        As ``sequence_ids`` and so on in :class:`~kvkeep.RetentionCache`.

    Raises
    ------
    UnsupportedError
        If some layers of the model keep a cache of their own, or change their logits before the softmax.
    """
    whole = hear(model, Full(), readings, at_once=True)
    part = hear(
        model, policy, readings, names=names, seed=seed, calibration=calibration, gates=gates, at_once=False
    )
    found = []
    for row, reading in enumerate(readings):
        evidence, rivals = reading.masks()
        full, own = whole.logits[row], part.logits[row]
        seen = ~full[0, 0].isneginf()
        found.append(
            Measured(
                id=reading.id,
                full=attention(full, evidence, rivals),
                evicted=attention(own, evidence, rivals),
                retained=retained(full, evidence, ~own.isneginf()),
                right_full=whole.right[row],
                right_evicted=part.right[row],
                evidence=(evidence & seen).sum(-1),
                distractors=(~evidence & seen).sum(-1),
                mean_cache=part.mean_cache,
            )
        )
    return found


def hear(
    model: PreTrainedModel, policy: Policy, readings: Sequence[Reading], *, at_once: bool, **options: Any
) -> Heard:
    """One pass over a batch.

    Parameters
    ----------
    at_once
        Read everything in one forward; else the prompts, and then token by token.
    options
        ``names``, ``seed``, ``calibration`` and ``gates``.
    """
    names = options.pop("names", None)
    texts = [reading.tokens for reading in readings]
    cache = RetentionCache(
        model,
        policy,
        sequence_ids=None if names is None else list(names),
        context=max(map(len, texts)),
        rows=len(texts),
        **options,
    )
    if len(cache.managed_layers) != len(cache.layers):
        raise UnsupportedError(
            "attention of this model cannot be measured",
            ["some of its layers keep a cache of their own (sliding window): their entries are not known"],
        )
    watch = Watch(cache, [reading.queries for reading in readings], [len(text) for text in texts])
    right = [torch.zeros(len(reading.queries), dtype=torch.bool) for reading in readings]

    def judge(logits: Tensor, first: Sequence[int]) -> None:
        """``first``: position of each row's first column of the logits."""
        best = logits.argmax(-1).tolist()
        for row, reading in enumerate(readings):
            for place, query in enumerate(reading.queries):
                if 0 <= query - first[row] < logits.shape[1]:
                    right[row][place] = best[row][query - first[row]] == reading.tokens[query + 1]

    heads = texts if at_once else [reading.tokens[: reading.prompt] for reading in readings]
    ids, mask = left_padded(heads, model.device)
    behind = max(len(text) - reading.prompt for text, reading in zip(texts, readings, strict=True))
    logits = _forward(model, cache, ids, mask, last=behind if at_once else 1)
    lengths = [len(head) for head in heads]
    judge(logits, [length - logits.shape[1] for length in lengths])
    if at_once:
        return Heard([torch.stack(row) for row in watch.logits], right, cache.trace.mean_entries)
    steps = max(len(text) - length for text, length in zip(texts, lengths, strict=True))
    for step in range(steps):
        # A row that has come to its end repeats its last token; none of its queries comes after that.
        places = [min(length + step, len(text) - 1) for text, length in zip(texts, lengths, strict=True)]
        tokens = [[text[place]] for text, place in zip(texts, places, strict=True)]
        mask = torch.cat([mask, mask.new_ones(len(texts), 1)], -1)
        logits = _forward(model, cache, torch.tensor(tokens, device=model.device), mask, last=1)
        judge(logits, [length + step for length in lengths])
    return Heard([torch.stack(row) for row in watch.logits], right, cache.trace.mean_entries)


def _forward(model: PreTrainedModel, cache: RetentionCache, ids: Tensor, mask: Tensor, last: int) -> Tensor:
    """Logits ``[batch, last, vocabulary]`` of the newest columns."""
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    options: dict[str, Any] = {cache_argument(model): cache}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        options["logits_to_keep"] = last
    output = model(input_ids=ids, attention_mask=mask, position_ids=positions, **options)
    return output.logits[:, -last:]  # type: ignore[no-any-return]


def left_padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows of tokens and their mask, ``[batch, longest]``; padding is token 0."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask
