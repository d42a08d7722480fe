"""The tiny reasoner: its shapes, untrained or with the shipped weights."""

from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from kvkeep.testbed.shipped import shipped_model
from kvkeep.testbed.tokenizer import IDS, WORDS


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Layers and widths of a tiny Qwen3 model."""

    layers: int = 3
    width: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    feed_forward: int = 256
    rope_theta: float = 1_000_000.0


def make_model(shape: Shape, seed: int) -> PreTrainedModel:
    """Return an untrained model in float32."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(WORDS),
        hidden_size=shape.width,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=True,
        pad_token_id=IDS["PAD"],
        bos_token_id=IDS["BOS"],
        eos_token_id=IDS["END"],
    )
    return Qwen3ForCausalLM(config).float()


def load(name: str = "trace-1") -> PreTrainedModel:
    """Return a shipped model in float32, ready to generate.

    Raises
    ------
    ConfigError
        If no model of that name is shipped.
    """
    return AutoModelForCausalLM.from_pretrained(shipped_model(name), dtype=torch.float32).eval()
