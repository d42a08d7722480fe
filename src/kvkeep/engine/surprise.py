"""How unsure a model is of its next token: told to a cache whose policy evicts by it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from transformers import LogitsProcessor

if TYPE_CHECKING:
    from kvkeep.engine.retention_cache import RetentionCache


def entropy_of(logits: Tensor) -> Tensor:
    """Entropy of the next token in nats, at temperature 1: ``[batch, vocabulary]`` in, ``[batch]`` out.

    Examples
    --------
    >>> import torch
    >>> entropy_of(torch.zeros(1, 8)).exp().round()
    tensor([8.])
    """
    log_shares = logits.float().log_softmax(-1)
    # A token that is ruled out has no share: 0 times minus infinity would be NaN.
    return -(log_shares.exp() * log_shares.clamp(min=-1e4)).sum(-1)


class EntropyNote(LogitsProcessor):  # type: ignore[misc]
    """Tells a cache what ``model.generate`` is about to draw from, and leaves it as it is.

    Parameters
    ----------
    cache
        Which asks for it (``cache.wants_entropy``).
    """

    def __init__(self, cache: RetentionCache) -> None:
        self.cache = cache

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.cache.note_entropy(entropy_of(scores))
        return scores
