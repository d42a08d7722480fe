"""The tiny reasoner: its shapes, and where the shipped weights lie."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from kvkeep.core.errors import ConfigError
from kvkeep.testbed.tokenizer import IDS, WORDS

SHIPPED = Path(__file__).parent / "models"


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


def shipped_models() -> list[str]:
    """Return the names of the models that come with kvkeep."""
    return sorted(folder.name for folder in SHIPPED.iterdir() if (folder / "config.json").exists())


def load(name: str = "trace-1") -> PreTrainedModel:
    """Return a shipped model in float32, ready to generate.

    Raises
    ------
    ConfigError
        If no model of that name is shipped.
    """
    if name not in shipped_models():
        raise ConfigError(
            f"no model {name!r} comes with kvkeep. Choose one of {', '.join(shipped_models())}."
        )
    return AutoModelForCausalLM.from_pretrained(SHIPPED / name, dtype=torch.float32).eval()
