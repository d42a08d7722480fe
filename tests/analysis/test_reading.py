"""Values on their way into the cache: those of the stock cache, and nothing left behind."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from kvkeep.analysis.reading import MAGNITUDES, read_portions
from kvkeep.analysis.round_trip import law, min_max, scheme
from kvkeep.core.errors import ConfigError
from kvkeep.engine.generation import cache_argument
from kvkeep.evaluation.retention_reading import read_log_betas
from kvkeep.testing.models import VOCABULARY, random_gates, tiny_model


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    """Random ids."""
    return torch.randint(2, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))


def test_magnitudes_are_those_of_the_stock_cache() -> None:
    """Chunks must not change what is measured, and the model goes back to its own attention."""
    model = tiny_model("llama")
    before = model.config._attn_implementation
    ids = tokens(50)
    (portion,) = read_portions(model, [ids], chunk=16, window=8, schemes=[scheme("minmax-b4g4")])
    assert model.config._attn_implementation == before
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[None], **{cache_argument(model): cache})
    assert portion.layers == (0, 1)
    assert portion.tokens == 50
    for place, layer in enumerate(cache.layers):
        values = layer.values[0].double().numpy()
        found = {kind: portion.magnitudes[kind][place].numpy() for kind in MAGNITUDES}
        np.testing.assert_allclose(found["range"], values.max(-1) - values.min(-1), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(found["variance"], values.var(-1, ddof=1), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(found["l2"], np.linalg.norm(values, axis=-1), rtol=1e-4, atol=1e-6)
        back = min_max(layer.values[0], bits=4, group=4)
        error = (layer.values[0] - back).square().mean(-1)
        torch.testing.assert_close(portion.errors["minmax-b4g4"][place], error, rtol=1e-2, atol=1e-7)
        expected = law(layer.values[0], bits=4, group=4)
        torch.testing.assert_close(portion.expected["minmax-b4g4"][place], expected, rtol=1e-3, atol=1e-8)


def test_attention_is_that_of_the_last_queries() -> None:
    """Against the eager attention that transformers gives out; every query's shares sum to one."""
    model = tiny_model("llama")
    model.set_attn_implementation("eager")
    ids = tokens(40, seed=1)
    (portion,) = read_portions(model, [ids], chunk=7, window=5)
    with torch.no_grad():
        shown = model(ids[None], output_attentions=True).attentions
    heads = portion.attention.shape[1]
    for place, weights in enumerate(shown):
        grouped = weights[0, :, -5:].unflatten(0, (heads, -1)).mean((1, 2))
        torch.testing.assert_close(portion.attention[place], grouped, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(portion.attention.sum(-1), torch.ones(portion.attention.shape[:2]))


def test_long_texts_come_in_portions() -> None:
    """Each as if it were read alone; rests of sinks only are left out, progress counts the others."""
    model = tiny_model("llama")
    ids, seen = tokens(67), []
    found = list(
        read_portions(model, [ids, tokens(3)], portion=32, window=4, progress=lambda *each: seen.append(each))
    )
    assert [each.tokens for each in found] == [32, 32]
    assert seen == [(32, 64), (64, 64)]
    (alone,) = read_portions(model, [ids[32:64]], window=4)
    torch.testing.assert_close(found[1].magnitudes["range"], alone.magnitudes["range"])


def test_a_planted_value_is_found() -> None:
    """A token whose value is made large has the largest range of its head."""
    model = tiny_model("llama")
    ids = torch.full((30,), 5)
    ids[17] = 9
    layer = model.model.layers[0]
    with torch.no_grad():
        # Two directions: the projection of values makes little of one and much of the other.
        model.get_input_embeddings().weight[5] = torch.eye(model.config.hidden_size)[0]
        model.get_input_embeddings().weight[9] = torch.eye(model.config.hidden_size)[1]
        layer.self_attn.v_proj.weight[:, 0] *= 0.01
        layer.self_attn.v_proj.weight[:, 1] *= 100
    (portion,) = read_portions(model, [ids], window=4)
    assert portion.magnitudes["range"][0].argmax(-1).tolist() == [17] * portion.attention.shape[1]


def test_retention_is_that_of_the_gates() -> None:
    """What is left at the end of the text: log beta times age, as the policies rank it."""
    model = tiny_model("llama")
    gates, ids = random_gates(model), tokens(23, seed=2)
    (portion,) = read_portions(model, [ids], chunk=8, window=4, gates=gates)
    assert portion.retention is not None
    age = 24 - torch.arange(23)
    torch.testing.assert_close(
        portion.retention, read_log_betas(model, gates, ids) * age, rtol=1e-3, atol=1e-5
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"portion": 4}, "portion 4 leaves nothing to measure: give at least 5"),
        ({"chunk": 0}, "chunk 0 leaves nothing to measure: give at least 1"),
        ({"schemes": [scheme("hqq-b2g64")]}, "do not fill a value"),
    ],
)
def test_what_cannot_be_measured_is_explained(settings: dict, message: str) -> None:
    """Before the first forward."""
    with pytest.raises(ConfigError, match=message):
        list(read_portions(tiny_model("llama"), [tokens(20)], **settings))
    with pytest.raises(ConfigError, match="nothing to read"):
        list(read_portions(tiny_model("llama"), [tokens(4)]))
