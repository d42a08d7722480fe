"""Read a text once, and see what the gates say of every token of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvkeep.core.errors import ConfigError
from kvkeep.engine.generation import cache_argument
from kvkeep.engine.retention_cache import RetentionCache
from kvkeep.engine.spec import model_spec
from kvkeep.policies.trim_kv import TrimKV


@torch.inference_mode()
def read_log_betas(
    model: PreTrainedModel,
    gates: Any,
    tokens: Tensor,
    *,
    chunk: int = 512,
    on_chunk: Callable[[int], None] = lambda tokens: None,
) -> Tensor:
    """Log beta of every token of a text: what a policy would be given of it.

    The text goes through a cache that is large enough to keep it, by the way that generation takes, and the
    numbers are those stored beside its entries.

    Parameters
    ----------
    gates
        :class:`kvkeep.gates.RetentionGates` of the model.
    tokens
        int64 ``[tokens]``.
    chunk
        Tokens per forward.
    on_chunk
        Called after each forward with the tokens it has read.

    Returns
    -------
    Tensor
        float32 ``[layers, kv_heads, tokens]`` on the CPU; layers are those with full attention, in order.

    Raises
    ------
    ConfigError
        If there is no token, or more than the model has positions.
    UnsupportedError
        If gates and model do not fit.
    """
    length, limit = len(tokens), model_spec(model.config).max_positions
    if length < 1:
        raise ConfigError("there is no token to look at: give a text of at least one word.")
    if limit is not None and length > limit:
        raise ConfigError(
            f"a text of {length} tokens is longer than the model's {limit} positions: give a shorter one."
        )
    cache = RetentionCache(model, TrimKV(budget=length + 1), gates=gates, context=length)
    for start in range(0, length, chunk):
        part = tokens[start : start + chunk].to(model.device)
        places = torch.arange(start, start + len(part), device=model.device)
        model(input_ids=part[None], position_ids=places[None], **{cache_argument(model): cache})
        on_chunk(len(part))
    for layer in cache.managed_layers:
        layer.settle()
    name = "extra.log_retention"
    return torch.stack([layer.stored.padded(None, name)[name][0].cpu() for layer in cache.managed_layers])
