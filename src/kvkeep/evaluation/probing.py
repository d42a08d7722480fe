"""One prompt and its right answer under many policies: what each writes, and what it gives the answer."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvkeep.core.errors import ConfigError
from kvkeep.engine.generation import cache_argument
from kvkeep.engine.retention_cache import RetentionCache
from kvkeep.engine.trace import Trace
from kvkeep.evaluation.side_by_side import SideBySide


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What came out of one cache.

    Parameters
    ----------
    written
        Tokens chosen greedily, the end token left out.
    nats
        ``-log p`` of each token of the right answer, the ones before it given (teacher-forced). The first is
        predicted by the prompt's last token, which attends before anything is evicted.
    trace
        Measured memory, over both continuations.
    """

    written: tuple[int, ...]
    nats: tuple[float, ...]
    trace: Trace


@torch.inference_mode()
def probe(
    model: PreTrainedModel,
    caches: Sequence[RetentionCache],
    logits: Tensor,
    answer: Sequence[int],
    *,
    limit: int,
    end_tokens: frozenset[int] = frozenset(),
) -> list[Probe]:
    """Continue a prompt twice on each cache: as the model would, and with the right answer.

    Parameters
    ----------
    caches
        Each has read the same prompt, in one row; all are used up by this.
    logits
        Of the prompt's last token, ``[1, vocabulary]``.
    answer
        Tokens of the right answer.
    limit
        Most tokens to write.

    Raises
    ------
    ConfigError
        If there is nothing to write or to answer, or the caches have not read one row of the same length.
    """
    lengths = {tuple(cache.rows.seq_lens) for cache in caches}
    if limit < 1 or not answer or len(lengths) != 1 or len(next(iter(lengths))) != 1:
        raise ConfigError(
            f"a probe needs caches that have read the same prompt of one row, an answer, and room to write: "
            f"{len(lengths)} different prompts, an answer of {len(answer)} tokens, {limit} to write."
        )
    twice = torch.tensor([0, 0], device=logits.device)
    for cache in caches:
        # A prompt that waits for its eviction is evicted first: half the work, and nothing long is copied.
        cache.evictor.before_token(cache.managed_layers)
        cache.batch_select_indices(twice)
    position = next(iter(lengths))[0]
    logits = logits.expand(2 * len(caches), -1)
    options: dict[str, Any] = {cache_argument(model): SideBySide(caches)}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        options["logits_to_keep"] = 1
    written: list[list[int]] = [[] for _ in caches]
    nats: list[list[float]] = [[] for _ in caches]
    writing = [True] * len(caches)
    for step in range(max(limit, len(answer))):
        given = answer[min(step, len(answer) - 1)]
        tokens = logits.argmax(-1)
        tokens[1::2] = given
        for place, token in enumerate(tokens[::2].tolist()):
            writing[place] = writing[place] and token not in end_tokens and step < limit
            if writing[place]:
                written[place].append(token)
        if step < len(answer):
            for place, row in enumerate(logits[1::2]):
                nats[place].append(-float(row.double().log_softmax(-1)[given]))
        if step + 1 >= len(answer) and (step + 1 >= limit or not any(writing)):
            break
        where = torch.full_like(tokens, position + step)[:, None]
        logits = model(input_ids=tokens[:, None], position_ids=where, **options).logits[:, -1]
    return [
        Probe(written=tuple(text), nats=tuple(of_answer), trace=cache.trace)
        for text, of_answer, cache in zip(written, nats, caches, strict=True)
    ]
