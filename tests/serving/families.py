"""Tiny random models of families that attend in ways of their own, as folders that vLLM can load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

VOCABULARY, WINDOW = 128, 24
#: Heads of 32: vLLM's CPU attention knows none that are smaller.
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}


def _mixed(kinds: str) -> dict[str, Any]:
    """Layers with a sliding window (``s``) among others (``f``)."""
    names = {"s": "sliding_attention", "f": "full_attention"}
    types = [names[kind] for kind in kinds]
    return {"num_hidden_layers": len(types), "layer_types": types, "sliding_window": WINDOW, "head_dim": 32}


def _gemma3(kinds: str) -> Any:
    config = transformers.Gemma3TextConfig(**{**_SHAPE, **_mixed(kinds)}, query_pre_attn_scalar=64)
    return transformers.Gemma3ForCausalLM(config)


_BUILDERS: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**_SHAPE, head_dim=32)),
    "phi3": lambda: transformers.Phi3ForCausalLM(transformers.Phi3Config(**_SHAPE)),
    "gemma3": lambda: _gemma3("sff"),
    "gemma3-full-first": lambda: _gemma3("fssf"),
}


def write_model(family: str, folder: Path) -> Any:
    """Make a model, save it, and return it."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = _BUILDERS[family]().float().eval()
        # Norms, biases and sinks start at 0 or 1, where many mistakes leave no trace.
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.data += 0.2 * torch.randn_like(parameter)
    model.set_attn_implementation("eager")
    model.save_pretrained(folder)
    return model
