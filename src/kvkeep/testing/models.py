"""Tiny random models of many families: every trait of attention that a cache can trip over.

Built from a config, without files or network, in a few milliseconds. Weights are larger than a fresh
model's, so that attention is peaked and a wrong entry shows in the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from kvkeep.core.errors import UnknownNameError
from kvkeep.engine.spec import model_spec
from kvkeep.gates.block_gates import BlockGates, BlockShape
from kvkeep.gates.modules import RetentionGates
from kvkeep.gates.shape import Architecture, GateShape

VOCABULARY = 96
PAD = 0
_WINDOW = 12

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "pad_token_id": PAD,
    "bos_token_id": None,
    "eos_token_id": None,  # every generation runs to its full length
    "tie_word_embeddings": False,
}
_SLIDING_FULL = ["sliding_attention", "full_attention", "full_attention"]


def _llama(**options: Any) -> PreTrainedModel:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SHAPE, **options))


def _llama_yarn() -> PreTrainedModel:
    rope = {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 1e4,
    }
    return _llama(rope_parameters=rope)


def _qwen2() -> PreTrainedModel:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**_SHAPE))


def _qwen3() -> PreTrainedModel:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**_SHAPE, head_dim=16))


def _mistral() -> PreTrainedModel:
    config = transformers.MistralConfig(**_SHAPE, head_dim=16, sliding_window=None)
    return transformers.MistralForCausalLM(config)


def _phi3() -> PreTrainedModel:
    return transformers.Phi3ForCausalLM(transformers.Phi3Config(**_SHAPE))


def _gemma3() -> PreTrainedModel:
    shape = _SHAPE | {"num_hidden_layers": 3}
    config = transformers.Gemma3TextConfig(
        **shape, head_dim=16, query_pre_attn_scalar=16, sliding_window=_WINDOW, layer_types=_SLIDING_FULL
    )
    return transformers.Gemma3ForCausalLM(config)


def _gpt_oss() -> PreTrainedModel:
    shape = _SHAPE | {"num_hidden_layers": 3}
    rope = {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 16,
        "rope_theta": 1.5e5,
        "truncate": False,
    }
    config = transformers.GptOssConfig(
        **shape,
        rope_parameters=rope,
        head_dim=16,
        sliding_window=_WINDOW,
        layer_types=_SLIDING_FULL,
        num_local_experts=4,
        num_experts_per_tok=2,
        attn_implementation="eager",
        experts_implementation="eager",  # the grouped kernel knows no float64
    )
    return transformers.GptOssForCausalLM(config)


def _qwen2_5_vl() -> PreTrainedModel:
    text = _SHAPE | {
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 64,
        "fullatt_block_indexes": [0],
    }
    special = {
        name: VOCABULARY - 1 - place
        for place, name in enumerate(
            ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
        )
    }
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **special)
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


_BUILDERS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": _llama,
    "llama-yarn": _llama_yarn,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mistral": _mistral,
    "phi3": _phi3,
    "gemma3": _gemma3,
    "gpt-oss": _gpt_oss,
    "qwen2.5-vl": _qwen2_5_vl,
}

FAMILIES = tuple(_BUILDERS)


def random_gates(
    model: PreTrainedModel, architecture: Architecture = "rg10", *, seed: int = 0, spread: float = 2.0
) -> RetentionGates:
    """Untrained retention gates for a model, that forget some tokens at once and keep others for long.

    In float64, so that a token's gate does not depend on how many others are computed with it.

    Parameters
    ----------
    spread
        Standard deviation, about, of the logits of beta, whose mean is 3.
    """
    gates = RetentionGates(GateShape.of(model_spec(model.config), architecture, width=16), bias=3.0).double()
    noise = torch.Generator().manual_seed(seed)
    for name, parameter in gates.named_parameters():
        if name.endswith("weight"):
            scale = spread if "first" not in name else 1.0
            size = parameter.shape[-1] ** -0.5
            parameter.data = scale * size * torch.randn(parameter.shape, generator=noise).double()
    return gates.to(model.device).requires_grad_(False)


def random_block_gates(model: PreTrainedModel, *, block: int = 16, seed: int = 0) -> BlockGates:
    """Untrained block gates for a model, in float64 (see :func:`random_gates`)."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        gates = BlockGates(BlockShape.of(model_spec(model.config), block=block)).double()
    return gates.to(model.device).requires_grad_(False)


def tiny_model(
    family: str = "llama",
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    attention: str | None = None,
) -> PreTrainedModel:
    """Build a random model of two or three layers, ready to generate.

    Parameters
    ----------
    family
        One of :data:`FAMILIES`.
    dtype
        Type of weights and cache. float64 makes results independent of the shape of a batch.
    seed
        Of the weights; the global random state is left alone.
    attention
        Attention back end (``"sdpa"``, ``"eager"``); ``None`` takes the family's default.

    Raises
    ------
    UnknownNameError
        For a family that does not exist.

    Examples
    --------
    >>> tiny_model("qwen3").config.num_key_value_heads
    2
    """
    if family not in _BUILDERS:
        raise UnknownNameError("model family", family, FAMILIES)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = _BUILDERS[family]()
        # Biases and norms start at 0 and 1, where many mistakes leave no trace.
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.data += 0.1 * torch.randn_like(parameter)
    if attention is not None:
        model.set_attn_implementation(attention)
    # Weights alone, as from_pretrained does it: rotary frequencies stay float32.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model.eval()


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random token ids of the given shape, none of them padding or special.

    Examples
    --------
    >>> tuple(tokens(2, 5).shape)
    (2, 5)
    """
    source = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY - 4, shape, generator=source)


def left_padded(lengths: list[int] | tuple[int, ...], *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random prompts of the given lengths as one batch: ids and attention mask, padded on the left.

    Examples
    --------
    >>> left_padded([1, 3])[1].tolist()
    [[0, 0, 1], [1, 1, 1]]
    """
    longest = max(lengths)
    ids = tokens(len(lengths), longest, seed=seed)
    column = torch.arange(longest)
    mask = (column >= longest - torch.tensor(lengths)[:, None]).long()
    return ids.masked_fill(mask == 0, PAD), mask
