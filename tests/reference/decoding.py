"""Ways of writing in plain loops: repetition by counting, and answers without any cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel


def repeated_share(written: Sequence[int], ngram: int, window: int) -> float:
    """Share of n-grams among the newest tokens that stood there before."""
    newest = list(written)[max(0, len(written) - window) :]
    seen: list[list[int]] = []
    repeats = total = 0
    for start in range(len(newest) - ngram + 1):
        gram = newest[start : start + ngram]
        repeats += gram in seen
        seen.append(gram)
        total += 1
    return repeats / total if total > 1 else 0.0


def answer_with_refeeding(model: PreTrainedModel, prompt: list[int], *, new: int, every: int) -> list[int]:
    """The likeliest tokens, all read anew for each; every so many, the prompt stands before the last one."""
    context, written, since = list(prompt), [], 0
    while len(written) < new:
        with torch.no_grad():
            token = int(model(torch.tensor([context])).logits[0, -1].argmax())
        written.append(token)
        since += 1
        if since == every:
            context += prompt
            since = 0
        context.append(token)
    return written


def told_with_refeeding(model: PreTrainedModel, prompt: list[int], *, new: int, every: int) -> list[float]:
    """Nats from which each token behind the prompt was drawn, in the order in which they go in.

    Those of a prompt that is read again are drawn by nobody.
    """
    context, told, since = list(prompt), [], 0
    for _ in range(new):
        with torch.no_grad():
            logits = model(torch.tensor([context])).logits[0, -1].double()
        shares = logits.softmax(-1)
        since += 1
        if since == every:
            context += prompt
            told += [0.0] * len(prompt)
            since = 0
        told.append(-sum(float(share * share.log()) for share in shares if share > 0))
        context.append(int(logits.argmax()))
    return told
