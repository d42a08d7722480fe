"""Which rotary embeddings kvkeep can calculate with, and that it turns queries back exactly."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

import kvkeep
from kvkeep.core.errors import UnsupportedError
from kvkeep.engine.rotary import rope_of
from kvkeep.engine.spec import model_spec
from kvkeep.kernels.rotation import unrotate
from kvkeep.testing.models import FAMILIES, tiny_model

SHAPE = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_a_rope(family: str) -> None:
    """A model that works today would be refused, or read with another model's frequencies."""
    model = tiny_model(family)
    spec = model_spec(model.config)
    assert rope_of(model, spec).rotary_dim == spec.rotary_dim


@pytest.mark.parametrize(
    ("config", "model"),
    [(GlmConfig, GlmForCausalLM), (CohereConfig, CohereForCausalLM)],
    ids=["glm", "cohere"],
)
def test_neighbouring_channels_are_refused(config: type, model: type) -> None:
    """Turned back as halves, queries would be noise, and so would the scores."""
    made = model(config(**SHAPE))
    with pytest.raises(UnsupportedError, match="neighbouring channels"):
        kvkeep.RetentionCache(made, kvkeep.ExpectedAttention(budget=100))
    kvkeep.RetentionCache(made, kvkeep.VaSEAttnV(budget=100))  # does not look at frequencies


def test_drifting_frequencies_are_refused() -> None:
    """Keys stored before a change of the frequencies would be scored with those after it."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=rope))
    with pytest.raises(UnsupportedError, match="'dynamic' changes its frequencies"):
        rope_of(model, model_spec(model.config))


def test_models_without_rotary_are_refused() -> None:
    """Learned positions cannot be turned back."""
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_head=4, n_layer=1, vocab_size=32))
    with pytest.raises(UnsupportedError, match="no rotary embedding"):
        rope_of(model, model_spec(model.config))


@pytest.mark.parametrize("family", ["llama", "llama-yarn"])
def test_unrotate_undoes_the_models_rotation(family: str) -> None:
    """The error would grow with the position, unseen by tests on short texts."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    model = tiny_model(family)
    spec = model_spec(model.config)
    positions = torch.tensor([[0, 1, 77, 4097, 31_999]])
    queries = torch.randn(1, 4, 5, spec.head_dim)
    turned, _ = apply_rotary_pos_emb(queries, queries, *model.model.rotary_emb(queries, positions))
    torch.testing.assert_close(unrotate(turned, positions, rope_of(model, spec)), queries, atol=1e-5, rtol=0)
