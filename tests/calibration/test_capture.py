"""Calibration against queries taken from inside tiny models, and end to end under TriAttention."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GlmConfig,
    GlmForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
)

import kvkeep
from kvkeep.calibration import Statistics, capture
from kvkeep.core.errors import BudgetError, ConfigError, UnsupportedError
from kvkeep.engine.attention import attention_name
from kvkeep.engine.generation import cache_argument
from kvkeep.engine.rotary import rope_of
from kvkeep.engine.spec import model_spec
from kvkeep.policies.set_diversity import SetDiversity
from kvkeep.policies.triattention import TriAttention
from kvkeep.testing.models import FAMILIES, tiny_model

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "attention_factor": 1.2,
}
IDS = torch.randint(1, 64, (60,), generator=torch.Generator().manual_seed(1))


def build(config: type, model: type, **options: Any) -> Any:
    torch.manual_seed(0)
    made = model(config(**SHAPE | options)).eval()
    for name, parameter in made.named_parameters():
        if "q_norm" in name or "bias" in name:  # ones and zeros would hide a norm or a bias left out
            torch.nn.init.normal_(parameter, 1.0, 0.5)
    return made


def q_norm(attention: Any) -> Any:
    return attention.q_norm


def q_proj(attention: Any) -> Any:
    return attention.q_proj


MODELS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "llama": (lambda: build(LlamaConfig, LlamaForCausalLM), q_proj),
    "qwen2": (lambda: build(Qwen2Config, Qwen2ForCausalLM), q_proj),
    "qwen3": (lambda: build(Qwen3Config, Qwen3ForCausalLM), q_norm),
    "partial": (
        lambda: build(StableLmConfig, StableLmForCausalLM, partial_rotary_factor=0.5),
        q_proj,
    ),
    "yarn": (lambda: build(LlamaConfig, LlamaForCausalLM, rope_parameters=YARN), q_proj),
}


def hooked_queries(model: Any, ids: Tensor, module: Callable[[Any], Any]) -> list[Tensor]:
    """What a module inside every attention gave out, ``[heads, tokens, head_dim]``, on a plain forward."""
    found: list[Tensor] = []
    handles = [
        module(layer.self_attn).register_forward_hook(
            lambda _, __, output: found.append(output.detach().reshape(len(ids), -1, 8).transpose(0, 1))
        )
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(ids[None])
    for handle in handles:
        handle.remove()
    return found


def assert_are_moments_of(statistics: Statistics, queries: list[Tensor], rotary_dim: int = 8) -> None:
    for index, each in enumerate(queries):
        each = each.double()
        turning, still = each[..., :rotary_dim], each[..., rotary_dim:]
        halves = [torch.cat(pair, -1) for pair in zip(turning.chunk(2, -1), still.chunk(2, -1), strict=True)]
        pairs = torch.complex(*halves)
        layer = statistics.layers[index]
        torch.testing.assert_close(layer.mean, pairs.mean(1).to(torch.complex64), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(layer.magnitude, pairs.abs().mean(1).float(), atol=1e-5, rtol=1e-4)
        assert float(layer.concentration.max()) <= 1 + 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_capture_is_the_query_before_rotation(name: str) -> None:
    """Skipping a query norm or a scaling would calibrate another model than the one that runs."""
    make, module = MODELS[name]
    model = make()
    statistics = capture(model, IDS, chunk=16)
    rotary = 4 if name == "partial" else 8
    assert statistics.rope.rotary_dim == rotary
    assert_are_moments_of(statistics, hooked_queries(model, IDS, module), rotary)


def test_fused_projections_need_no_special_case() -> None:
    """Phi-3 computes q, k and v in one product; a hook on q_proj would find nothing."""
    model = build(Phi3Config, Phi3ForCausalLM)
    statistics = capture(model, IDS, chunk=25)
    queries = hooked_queries(model, IDS, lambda attention: attention.qkv_proj)  # 4 query heads come first
    assert_are_moments_of(statistics, [each[:4] for each in queries])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_calibrated(family: str) -> None:
    """A family that kvkeep serves would be refused, or its sliding layers averaged into the scores."""
    model = tiny_model(family)
    statistics = capture(model, IDS, chunk=20)
    spec = model_spec(model.config)
    assert tuple(statistics.layers) == spec.managed
    assert not statistics.check(spec, rope_of(model, spec))


def test_interleaved_rotation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """GLM pairs neighbouring channels: turned back as halves, its queries would be noise.

    The cache knows that from the model's rotation function; capture also finds it where there is none.
    """
    monkeypatch.setattr("kvkeep.engine.rotary._turns_halves", lambda *_: None)
    with pytest.raises(UnsupportedError, match="half-split"):
        capture(build(GlmConfig, GlmForCausalLM), IDS)


def test_long_texts_start_again_at_position_zero() -> None:
    """Positions that the model was not made for would enter the statistics."""
    model = build(LlamaConfig, LlamaForCausalLM, max_position_embeddings=25)
    statistics = capture(model, IDS, chunk=10)
    pieces = [hooked_queries(model, part, q_proj) for part in IDS.split(25)]
    assert_are_moments_of(statistics, [torch.cat(parts, 1) for parts in zip(*pieces, strict=True)])


def test_limits_progress_and_provenance() -> None:
    """A file that does not say what was measured cannot be trusted later."""
    model = build(LlamaConfig, LlamaForCausalLM)
    model.config._name_or_path = "/somewhere/private/Tiny-Llama/"
    done: list[tuple[int, int]] = []
    statistics = capture(model, IDS, max_tokens=50, chunk=20, progress=lambda *each: done.append(each))
    assert done == [(20, 50), (40, 50), (50, 50)]
    provenance = statistics.provenance
    assert (provenance.tokens, provenance.model) == (50, "Tiny-Llama")
    assert provenance.kvkeep_version == kvkeep.__version__
    assert provenance.created.endswith("+00:00")
    assert_are_moments_of(statistics, hooked_queries(model, IDS[:50], q_proj))


class Letters:
    """A tokenizer of one token per character."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) % 64 for letter in text]}


def test_text_is_tokenized_and_hashed() -> None:
    """The hash would not be that of the file, so nobody could tell which text it was."""
    model = build(LlamaConfig, LlamaForCausalLM)
    text = "It was a dark and stormy night. " * 40
    statistics = capture(model, text, tokenizer=Letters(), max_tokens=30)
    assert statistics.provenance.text_sha256 == hashlib.sha256(text.encode()).hexdigest()
    same = capture(model, torch.tensor(Letters()(text)["input_ids"]), max_tokens=30)
    for index, layer in statistics.layers.items():
        assert torch.equal(layer.mean, same.layers[index].mean)
    with pytest.raises(ConfigError, match="tokenizer"):
        capture(model, text)


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ([], {}, "empty"),
        (torch.ones(2, 3), {}, "one sequence"),
        (IDS, {"chunk": 0}, "chunk 0"),
        (IDS, {"max_tokens": 0}, "max_tokens 0"),
    ],
)
def test_bad_input_is_refused(source: Any, options: dict[str, int], message: str) -> None:
    """A user would get a traceback from deep inside a model, or statistics of nothing."""
    with pytest.raises(ConfigError, match=message):
        capture(build(LlamaConfig, LlamaForCausalLM), source, **options)


def test_the_model_is_left_as_it_was() -> None:
    """Calibrating would change how the model attends, or leave dropout off, for the rest of the program."""
    model = build(LlamaConfig, LlamaForCausalLM)
    model.train()
    before = attention_name(model)

    def fail(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        capture(model, IDS, progress=fail)
    assert attention_name(model) == before
    assert model.training
    kvkeep.prepare(model)
    prepared = attention_name(model)
    capture(model, IDS)
    assert attention_name(model) == prepared


@pytest.mark.parametrize("name", ["llama", "qwen3", "partial", "yarn"])
@pytest.mark.parametrize(
    "policy",
    [
        TriAttention(budget=24, buffer=8),
        TriAttention(budget=24, buffer=8, mode="union", protect_prompt=False, trigger="clock"),
        TriAttention(budget=24, buffer=8, mode="per-layer-per-head", offset_reduce="max"),
        SetDiversity(budget=16, buffer=8),
        SetDiversity(budget=16, buffer=8, mode="per-head", recent=4),
    ],
    ids=lambda policy: f"{policy.name}-{policy.mode}",
)
def test_generation_under_calibrated_policies(name: str, policy: TriAttention) -> None:
    """The methods would not run on a real model: evict late, evict the prompt, or drift between layers."""
    model = MODELS[name][0]()
    statistics = capture(model, IDS)
    inputs = {"input_ids": IDS[None, :12], "attention_mask": torch.ones(1, 12, dtype=torch.int64)}
    cache = kvkeep.RetentionCache(model, policy, calibration=statistics)
    model.generate(**inputs, max_new_tokens=41, do_sample=False, **{cache_argument(model): cache})
    budget = policy.amount.count
    assert cache.trace.evictions >= 2
    assert cache.trace.peak_entries <= budget + 8
    cache.check_integrity()
    positions = [cache.kept_positions(layer)[0] for layer in range(2)]
    for layer in positions:
        for head in layer:
            if policy.protects_prompt:
                assert head[:12].tolist() == list(range(12))
    if policy.mode != "per-layer-per-head":
        assert [head.tolist() for head in positions[0]] == [head.tolist() for head in positions[1]]
    if policy.mode == "union":
        assert positions[0][0].tolist() == positions[0][1].tolist()


def test_a_protected_prompt_must_fit() -> None:
    """The official code keeps the beginning of the prompt and drops the whole answer, silently."""
    model = MODELS["llama"][0]()
    statistics = capture(model, IDS)
    inputs = {"input_ids": IDS[None, :20], "attention_mask": torch.ones(1, 20, dtype=torch.int64)}
    policy = TriAttention(budget=16, buffer=4)
    with pytest.raises(BudgetError, match="protect_prompt=False"):
        kvkeep.generate(model, policy, inputs, max_new_tokens=9, calibration=statistics)
    on_top = TriAttention(budget=kvkeep.Budget(entries=16, prompt="kept"), buffer=4)
    _, cache = kvkeep.generate(model, on_top, inputs, max_new_tokens=30, calibration=statistics)
    assert cache.trace.evictions > 0
    assert cache.kept_positions(0)[0][0][:20].tolist() == list(range(20))


def test_a_calibration_is_asked_for_and_checked() -> None:
    """A policy would run on the statistics of another model, or fail at its first eviction."""
    llama, qwen = MODELS["llama"][0](), MODELS["qwen3"][0]()
    with pytest.raises(UnsupportedError, match="kvkeep calibrate"):
        kvkeep.RetentionCache(llama, TriAttention(budget=24))
    with pytest.raises(UnsupportedError, match="model type llama, here qwen3"):
        kvkeep.RetentionCache(qwen, TriAttention(budget=24), calibration=capture(llama, IDS))
