"""What cannot be served correctly is refused: when the cache is built if it can be known then."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import PreTrainedModel

import kvkeep
from kvkeep.core.errors import BudgetError, CacheError, ConfigError, UnsupportedError
from kvkeep.engine.generation import cache_argument
from kvkeep.engine.spec import model_spec
from kvkeep.testing.models import left_padded, tiny_model, tokens
from kvkeep.testing.watching import feed

POLICY = kvkeep.VaSEAttnV(budget=24, buffer=8)
TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}


def deepseek() -> PreTrainedModel:
    latent = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
    experts = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
    config = transformers.DeepseekV3Config(
        **(TINY | {"num_key_value_heads": 4}), **latent, **experts, v_head_dim=4, moe_intermediate_size=8
    )
    return transformers.DeepseekV3ForCausalLM(config)


def t5() -> PreTrainedModel:
    config = transformers.T5Config(
        vocab_size=64, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=4, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def all_sliding() -> PreTrainedModel:
    return transformers.MistralForCausalLM(transformers.MistralConfig(**TINY, sliding_window=8))


def shared_layers() -> PreTrainedModel:
    config = transformers.Gemma3nTextConfig(
        **(TINY | {"num_hidden_layers": 4, "intermediate_size": [32] * 4}),
        head_dim=8,
        layer_types=["full_attention"] * 4,
        num_kv_shared_layers=2,
        activation_sparsity_pattern=[0.0] * 4,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=64,
    )
    return transformers.Gemma3nForCausalLM(config)


def cross_attention() -> PreTrainedModel:
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=64, n_embd=16, n_layer=1, n_head=2, add_cross_attention=True
    )
    return transformers.GPT2LMHeadModel(config)


@pytest.mark.parametrize(
    ("build", "reasons"),
    [
        (deepseek, ["every layer is multi-head latent attention", "one latent for all heads"]),
        (t5, ["encoder-decoder", "cross-attention has a second cache"]),
        (all_sliding, ["no layer is full attention", "bound their own memory already"]),
        (shared_layers, ["its last 2 layers read the cache of earlier layers"]),
        (cross_attention, ["its layers have cross-attention"]),
    ],
)
def test_models_that_cannot_be_served_are_refused_with_the_reason(build: Any, reasons: list[str]) -> None:
    """A wrong answer is worse than none: the user learns which part of the model stands in the way."""
    model = build()
    with pytest.raises(UnsupportedError) as caught:
        kvkeep.RetentionCache(model, POLICY)
    for reason in reasons:
        assert reason in str(caught.value)
    assert model.config.get_text_config(decoder=True)._attn_implementation in ("sdpa", "eager", None)


def test_a_layer_of_an_unknown_kind_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model may mix in one layer that we cannot replace; "unsupported model" would not say which."""

    class OddLayer(transformers.cache_utils.DynamicLayer):
        pass

    plan = transformers.DynamicCache

    class OddCache(plan):  # type: ignore[misc, valid-type]
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.layers[1] = OddLayer()

    monkeypatch.setattr("kvkeep.engine.spec.DynamicCache", OddCache)
    with pytest.raises(UnsupportedError, match="layer 1 needs a OddLayer, which kvkeep cannot replace"):
        model_spec(tiny_model("llama").config)


def test_flex_attention_is_refused_when_the_cache_is_built() -> None:
    """Its masks are block masks of the whole sequence; ours are rows of stored entries."""
    model = tiny_model("llama", attention="flex_attention")
    with pytest.raises(
        UnsupportedError, match=r"'flex_attention' is not one of .*attn_implementation='sdpa'"
    ):
        kvkeep.RetentionCache(model, POLICY)
    assert model.config._attn_implementation == "flex_attention"


@pytest.mark.parametrize("wrong", ["vase-attnv", kvkeep.VaSEAttnV, 1024, None])
def test_something_else_than_a_policy_object_is_refused(wrong: Any) -> None:
    """The commonest slip is to pass the name or the class."""
    with pytest.raises(ConfigError, match=r"is not a policy object: pass kvkeep\.policy\("):
        kvkeep.RetentionCache(tiny_model("llama"), wrong)


@pytest.mark.parametrize(
    "wrong", [None, "smollm", transformers.LlamaForCausalLM, transformers.LlamaConfig(**TINY)]
)
@pytest.mark.parametrize("build", ["cache", "generate", "prepare"])
def test_something_else_than_a_model_is_refused(wrong: Any, build: str) -> None:
    """A name, a class or a config in the model's place would fail on one of its attributes."""
    calls: dict[str, Callable[[], object]] = {
        "cache": lambda: kvkeep.RetentionCache(wrong, POLICY),
        "generate": lambda: kvkeep.generate(wrong, POLICY, {"input_ids": tokens(1, 4)}, max_new_tokens=1),
        "prepare": lambda: kvkeep.prepare(wrong),
    }
    with pytest.raises(ConfigError, match=r"is not a loaded model.*AutoModelForCausalLM\.from_pretrained"):
        calls[build]()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"seed": "x"}, "seed 'x' is not a whole number: write for example seed=0."),
        ({"seed": 1.5}, "seed 1.5 is not a whole number: write for example seed=0."),
        ({"seed": None}, "seed None is not a whole number: write for example seed=0."),
        ({"context": 0}, "context 0 is not a whole number of at least 1: write for example context=8192."),
        ({"rows": "8"}, "rows '8' is not a whole number of at least 1: write for example rows=8."),
        ({"sequence_ids": 7}, "sequence_ids 7 are not whole numbers, one per row"),
        ({"sequence_ids": "07"}, "sequence_ids '07' are not whole numbers, one per row"),
        ({"sequence_ids": [0, 1.0]}, "sequence_ids [0, 1.0] are not whole numbers, one per row"),
        ({"sequence_ids": [0, True]}, "sequence_ids [0, True] are not whole numbers, one per row"),
        ({"sequence_ids": torch.zeros(1, 2, dtype=torch.int64)}, "are not whole numbers, one per row"),
        ({"sequence_ids": [2**63]}, "sequence id 9223372036854775808 does not fit 64 bits"),
        ({"calibration": "a.calibration"}, "calibration=kvkeep.calibration.load('a.calibration')"),
        ({"calibration": Path("a.calibration")}, "calibration=kvkeep.calibration.load('a.calibration')"),
        ({"calibration": 7}, "calibration takes statistics, and 7 is something else"),
    ],
)
def test_an_argument_of_the_wrong_kind_is_explained(options: dict[str, Any], sentence: str) -> None:
    """Each of them ended in an error of Python or torch, some only at the first eviction."""
    model = tiny_model("llama")
    with pytest.raises(ConfigError) as caught:
        kvkeep.RetentionCache(model, POLICY, **options)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
    assert model.config._attn_implementation == "sdpa"  # nothing was begun


@pytest.mark.parametrize("ids", [(3, 4), range(3, 5), np.array([3, 4]), torch.tensor([3, 4])])
def test_sequence_ids_may_come_in_any_row_of_whole_numbers(ids: Any) -> None:
    """A data loader gives them as a tensor."""
    model = tiny_model("llama")
    cache = kvkeep.RetentionCache(model, POLICY, seed=np.int64(5), sequence_ids=ids)
    feed(model, cache, tokens(2, 5), torch.ones(2, 5, dtype=torch.int64), [5])
    assert cache.rows.sequence_ids == [3, 4]


def test_an_unresolved_budget_is_refused() -> None:
    """A ratio of nothing would become a budget of nothing."""
    policy = kvkeep.VaSEDKV(budget=kvkeep.Budget.from_keep_ratio(0.5), buffer=4, sinks=1)
    with pytest.raises(BudgetError, match="context=8192 on the cache"):
        kvkeep.RetentionCache(tiny_model("llama"), policy)


def test_sequence_ids_must_fit_the_batch() -> None:
    """Ids that are one short would give the last row the random numbers of another."""
    model = tiny_model("llama")
    cache = kvkeep.RetentionCache(model, POLICY, sequence_ids=[7, 8])
    with pytest.raises(ConfigError, match="2 sequence_ids were given for a batch of 3"):
        feed(model, cache, tokens(3, 5), torch.ones(3, 5, dtype=torch.int64), [5])


@pytest.mark.parametrize("steps", [[6], [4, 2]])
def test_padding_on_the_right_is_refused(steps: list[int]) -> None:
    """Right padding would put pad tokens between the prompt and the answer."""
    model = tiny_model("llama")
    ids, mask = left_padded((3, 6))
    with pytest.raises(UnsupportedError, match=r"pad prompts on the left.*padding_side = 'left'"):
        feed(model, kvkeep.RetentionCache(model, POLICY), ids, mask.flip(1), steps)


@pytest.mark.parametrize("first", [True, False])
def test_a_custom_mask_is_refused(first: bool) -> None:
    """Its columns are tokens; after an eviction the cache has fewer columns, and others."""
    model = tiny_model("llama")
    cache = kvkeep.RetentionCache(model, POLICY)
    seen = 0 if first else 4
    if not first:
        feed(model, cache, tokens(1, 4), torch.ones(1, 4, dtype=torch.int64), [4])
    mask = torch.ones(1, 1, 1 if seen else 4, seen + (1 if seen else 4), dtype=torch.bool).tril(seen)
    with pytest.raises(UnsupportedError, match="custom 4-D mask"), torch.no_grad():
        model(tokens(1, 1 if seen else 4), attention_mask=mask, **{cache_argument(): cache})


def test_changing_the_attention_after_building_the_cache_is_explained() -> None:
    """The stock attention would fail on a handle with an error about attributes."""
    model = tiny_model("llama")
    cache = kvkeep.RetentionCache(model, POLICY)
    model.set_attn_implementation("eager")
    with pytest.raises(CacheError, match=r"kvkeep\.prepare\(model\)"):
        feed(model, cache, tokens(1, 4), torch.ones(1, 4, dtype=torch.int64), [4])


def test_assisted_decoding_is_refused() -> None:
    """It reads several tokens at a time and crops: nothing would be evicted, or too much be lost."""
    model = tiny_model("llama")
    cache = kvkeep.RetentionCache(model, POLICY)
    with pytest.raises(UnsupportedError, match="draft tokens are taken back"):
        model.generate(
            tokens(1, 10).repeat(1, 2),
            max_new_tokens=20,
            prompt_lookup_num_tokens=3,
            **{cache_argument(): cache},
        )


@pytest.mark.skipif(
    importlib.util.find_spec("flash_attn") is None or not torch.cuda.is_available(),
    reason="flash-attn is not installed, or there is no GPU",
)
@pytest.mark.gpu
def test_flash_attention_agrees_with_sdpa() -> None:
    """The one back end that aligns its causal mask by itself."""
    model = tiny_model("llama", dtype=torch.bfloat16).cuda()
    ids, mask = tokens(1, 60).cuda(), torch.ones(1, 60, dtype=torch.int64).cuda()
    lengths = [30, *[1] * 30]
    sdpa = torch.cat(feed(model, kvkeep.RetentionCache(model, POLICY), ids, mask, lengths), 1)
    kvkeep.restore(model)
    model.set_attn_implementation("flash_attention_2")
    flash = torch.cat(feed(model, kvkeep.RetentionCache(model, POLICY), ids, mask, lengths), 1)
    assert (sdpa - flash).abs().max() < 0.2
