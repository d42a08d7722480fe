"""From last hidden states to logits, a block of tokens at a time, as the model itself would compute them."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel


class LogitHead:
    """The output projection of a model, with the scale or cap that its family puts on logits.

    Parameters
    ----------
    model
        A causal language model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.projection = model.get_output_embeddings()
        config = model.config.get_text_config(decoder=True)
        self.factor = float(getattr(config, "logit_scale", None) or 1.0)  # Cohere
        self.factor /= float(getattr(config, "logits_scaling", None) or 1.0)  # Granite
        self.cap = getattr(config, "final_logit_softcapping", None)  # Gemma

    def __call__(self, hidden: Tensor) -> Tensor:
        """``[tokens, hidden_size]`` to float32 logits ``[tokens, vocabulary]``."""
        logits: Tensor = self.projection(hidden).float()
        if self.factor != 1:
            logits = logits * self.factor
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)
