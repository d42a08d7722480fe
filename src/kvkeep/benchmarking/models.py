"""Models to measure: random weights of a known shape, a stock twin, and what a step reads of them."""

from __future__ import annotations

import copy
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen3Config

from kvkeep.core.errors import UnknownNameError
from kvkeep.engine.attention import restore

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_QWEN3 = {"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960}
_ROPE = {"rope_type": "default", "rope_theta": 1_000_000.0}

# Shapes by name: the config class and what differs from its defaults.
SHAPES: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen3-14b": (
        Qwen3Config,
        _QWEN3
        | {
            "hidden_size": 5120,
            "intermediate_size": 17408,
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
            "tie_word_embeddings": False,
            "rope_parameters": _ROPE,
        },
    ),
    "qwen3-4b": (
        Qwen3Config,
        _QWEN3
        | {
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "tie_word_embeddings": True,
            "rope_parameters": _ROPE,
        },
    ),
    "smollm2-135m": (
        LlamaConfig,
        {
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
        },
    ),
    "tiny": (
        LlamaConfig,
        {
            "vocab_size": 128,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
        },
    ),
}


def random_model(
    shape: str, *, dtype: str = "float32", device: str | torch.device = "cpu", seed: int = 0
) -> PreTrainedModel:
    """Build a model of a given shape with random weights.

    Parameters
    ----------
    shape
        One of :data:`SHAPES`.
    dtype, device
        How and where the weights are held.
    seed
        Of the weights.

    Raises
    ------
    UnknownNameError
        If the shape or the dtype is unknown.
    """
    if shape not in SHAPES:
        raise UnknownNameError("shape", shape, SHAPES)
    if dtype not in DTYPES:
        raise UnknownNameError("dtype", dtype, DTYPES)
    kind, options = SHAPES[shape]
    torch.manual_seed(seed)
    with torch.device(device):  # the weights are drawn where they will live, not copied there
        model = AutoModelForCausalLM.from_config(kind(**options), dtype=DTYPES[dtype])
    return model.eval()


def stock_twin(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights under the stock attention function, as a second object.

    Baselines run on the twin, so that nothing of kvkeep is in their path and a compiled baseline is
    not recompiled whenever the arms alternate.
    """
    shared = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    twin: PreTrainedModel = copy.deepcopy(model, shared)
    restore(twin)
    return twin


def step_weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of weights that one decode step must read.

    Every parameter once, except an input embedding that is not also the output projection: a step
    reads one row of it per sequence.
    """
    unique = {id(p): p for p in model.parameters()}
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    table = None if embedding is None else embedding.weight
    if table is not None and (head is None or head.weight is not table):
        unique.pop(id(table), None)
    return sum(parameter.nbytes for parameter in unique.values())


def random_prompt(model: PreTrainedModel, batch: int, tokens: int, seed: int) -> Tensor:
    """Random token ids ``[batch, tokens]``."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    return torch.randint(vocabulary, (batch, tokens), generator=generator).to(model.device)
