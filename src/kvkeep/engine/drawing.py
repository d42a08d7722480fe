"""Drawing the next token by a highest score: random numbers of a sample, in any engine and batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import TopKLogitsWarper, TopPLogitsWarper

from kvkeep.core.random import RandomStream

# Stands for the layer in the random stream: no layer of a model has it.
_SAMPLING = -1


@dataclass(frozen=True, kw_only=True)
class Draw:
    """How the next token is drawn.

    The highest sum of logit and Gumbel noise is a draw from the softmax. The noise is a hash of (sequence,
    step, token), so that a sample is the same in any batch, after a restart, on any machine.

    Parameters
    ----------
    temperature
        0 takes the likeliest token.
    top_p, top_k
        Draw from the smallest set of this probability, and from so many tokens at most (0: all).
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0

    def scores(
        self, logits: Tensor, sequence_ids: Tensor, steps: Tensor, temperatures: Tensor | None = None
    ) -> Tensor:
        """Scores whose largest is the draw.

        Parameters
        ----------
        logits
            ``[batch, vocabulary]``.
        sequence_ids
            int64 ``[batch]``: names of the rows.
        steps
            int64 ``[batch]``: tokens that each row has written before.
        temperatures
            float32 ``[batch]``: each row's own, instead of :attr:`temperature`.

        Returns
        -------
        Tensor
            ``[batch, vocabulary]``; the logits themselves without temperature.
        """
        if temperatures is not None:
            warm = temperatures[:, None] > 0
            scores = logits.float() / temperatures.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
            return torch.where(warm, self._noisy(scores.masked_fill(~warm, 0.0), sequence_ids, steps), logits)
        if self.temperature == 0:
            return logits
        return self._noisy(logits.float() / self.temperature, sequence_ids, steps)

    def _noisy(self, scores: Tensor, sequence_ids: Tensor, steps: Tensor) -> Tensor:
        if self.top_k:
            scores = TopKLogitsWarper(self.top_k)(sequence_ids, scores)
        if self.top_p < 1:
            scores = TopPLogitsWarper(self.top_p)(sequence_ids, scores)
        stream = RandomStream.derive(
            seed=0,  # the names of the sequences carry the seed
            sequence_ids=sequence_ids,
            layer=_SAMPLING,
            evictions=steps,
        )
        tokens = torch.arange(scores.shape[-1], device=scores.device).expand(len(scores), 1, -1)
        return scores + stream.gumbel(tokens)[:, 0]
