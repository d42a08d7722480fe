"""What cannot be served is refused at the start, with every reason."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig

from kvkeep.engine.spec import model_spec
from kvkeep.serving.refusals import config_reasons, policy_reasons, version_reasons
from kvkeep.serving.settings import Settings
from kvkeep.testbed.shipped import shipped_model

# Parts of vLLM's configuration, as far as they are looked at.
GOOD: dict[str, dict[str, Any]] = {
    "parallel_config": {
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "tensor_parallel_size": 1,
    },
    "cache_config": {"cache_dtype": "auto"},
    "model_config": {"use_mla": False, "is_encoder_decoder": False, "runner_type": "generate"},
}
CHANGES: list[tuple[str, str, Any, str]] = [
    ("", "speculative_config", object(), "speculative decoding"),
    ("", "kv_transfer_config", object(), "KV transfer"),
    ("cache_config", "cache_dtype", "fp8", "'fp8' is quantized"),
    ("parallel_config", "decode_context_parallel_size", 2, "decode context parallelism"),
    ("parallel_config", "prefill_context_parallel_size", 2, "prefill context parallelism"),
    ("model_config", "use_mla", True, "MLA"),
    ("model_config", "is_encoder_decoder", True, "encoder-decoder"),
    ("model_config", "runner_type", "pooling", "pooling"),
]


def config(changes: list[tuple[str, str, Any, str]]) -> Any:
    parts: dict[str, Any] = {name: SimpleNamespace(**values) for name, values in GOOD.items()}
    whole = SimpleNamespace(**parts, speculative_config=None, kv_transfer_config=None)
    for part, name, value, _ in changes:
        setattr(getattr(whole, part) if part else whole, name, value)
    return whole


def test_an_ordinary_configuration_is_served() -> None:
    """Nobody could use the plug-in."""
    assert config_reasons(config([])) == []
    assert config_reasons(config([("cache_config", "cache_dtype", "bfloat16", "")])) == []


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change[1])
def test_a_feature_that_is_not_served(change: tuple[str, str, Any, str]) -> None:
    """The server would run, and answer from entries that are not there."""
    (reason,) = config_reasons(config([change]))
    assert change[3] in reason


def test_all_reasons_come_together() -> None:
    """Each start of the server would show one more."""
    assert len(config_reasons(config(CHANGES))) == len(CHANGES)


def test_versions() -> None:
    """An untested release would be run without a word, or a tested one refused."""
    assert version_reasons("0.32.0", False) == version_reasons("0.32.1+cpu", False) == []
    (reason,) = version_reasons("0.33.0", False)
    assert "0.33.0 is untested" in reason
    assert "allow_untested" in reason
    assert version_reasons("0.3.2", False)
    assert version_reasons("0.33.0", True) == []


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"policy": "full"}, "keeps everything"),
        ({"policy": "quest"}, "quest is a selector: it keeps every entry and reads some of them"),
        ({"policy": "h2o"}, "adds up the attention"),
        ({"policy": "expected-attention"}, "moments of the prompt's queries"),
        ({"policy": "trimkv"}, "retention gates"),
        ({"policy": "snapkv", "options": {"trigger": "never"}}, "leave trigger out"),
        ({"policy": "snapkv", "options": {"trigger": "clock"}, "buffer": 40}, "no multiple of the buffer"),
        ({"policy": "snapkv", "options": {"prefill": "after"}}, "use 'defer'"),
        ({"policy": "snapkv + adaptive-heads", "prefill": "defer"}, 'use "prefill": "chunk"'),
        ({"policy": "snapkv + whole-model"}, "every layer decides alone"),
        ({"policy": "snapkv + shared-layers"}, "every layer decides alone"),
        ({"policy": "snapkv + surprise"}, "use another trigger"),
        ({"policy": "snapkv + merge"}, "evictions here only move entries"),
        ({"policy": "snapkv + cam"}, "evictions here only move entries"),
        ({"policy": "triattention", "options": {"mode": "per-layer-per-head"}}, "run `kvkeep calibrate`"),
        ({"policy": "triattention", "options": {"mode": "per-layer-per-head"}}, '"prompt": "kept"'),
    ],
)
def test_a_policy_that_is_not_served(settings: dict[str, Any], words: str) -> None:
    """A policy would run without what it reads, and still be called by its name."""
    policy = Settings(**{"budget": 96, "buffer": 32, **settings}).make_policy()
    spec = model_spec(AutoConfig.from_pretrained(shipped_model("trace-1")))
    assert any(words in reason for reason in policy_reasons(policy, spec, config([]), None))


@pytest.mark.parametrize(
    "name",
    [
        *("streaming-llm", "key-norm", "snapkv", "tova", "r-kv", "vase-dkv", "cur"),
        *("snapkv + norm-weighted", "vase-attnv + recency(weight=0.5)"),
    ],
)
@pytest.mark.parametrize("prompt", ["counts", "kept"])
def test_a_policy_that_is_served(name: str, prompt: Any) -> None:
    """A policy that works would be turned away."""
    policy = Settings(policy=name, budget=96, buffer=32, prompt=prompt).make_policy()
    spec = model_spec(AutoConfig.from_pretrained(shipped_model("trace-1")))
    assert policy_reasons(policy, spec, config([]), None) == []


@pytest.mark.parametrize(
    ("name", "ranks", "words"),
    [
        ("tova", 2, "looks at all heads of a layer together, and each of 2 tensor-parallel ranks"),
        ("tova + sample", 2, "looks at all heads of a layer together"),
        ("snapkv + adaptive-heads", 2, "looks at all heads of a layer together"),
        ("snapkv", 4, "4 tensor-parallel ranks share 2 KV heads: use --tensor-parallel-size of at most 2"),
        ("snapkv", 2, ""),
        ("vase-attnv", 2, ""),
        ("keydiff + sample + reserve", 2, ""),
        ("key-norm", 4, ""),
    ],
)
def test_heads_on_several_ranks(name: str, ranks: int, words: str) -> None:
    """Every rank would decide by its own heads, and call that by the policy's name."""
    policy = Settings(policy=name, budget=96, buffer=32).make_policy()
    spec = model_spec(AutoConfig.from_pretrained(shipped_model("trace-1")))  # two KV heads
    several = config([("parallel_config", "tensor_parallel_size", ranks, "")])
    reasons = policy_reasons(policy, spec, several, None)
    assert len(reasons) == bool(words)
    assert all(words in reason for reason in reasons)
