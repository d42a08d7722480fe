"""Layers of vLLM on kvkeep's back end for CUDA, on a machine without a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from kvkeep.testbed.shipped import shipped_model
from tests.serving import flash

BUDGET, BUFFER, SLOTS, BLOCKS = 40, 12, 16, 120
DIM = 64  # as in trace-1, whose config the engine reads


@dataclass
class Engine:
    """A managed layer and a layer with a sliding window, as a worker on CUDA would set them up."""

    config: Any
    full: Any
    sliding: Any
    spec: Any
    builder: Any
    cache: Tensor


def twins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the twins where vLLM's module has the kernels, and tell it that they are FlashAttention 3."""
    from vllm.v1.attention.backends import flash_attn

    for name in ("reshape_and_cache_flash", "flash_attn_varlen_func"):
        monkeypatch.setattr(flash_attn, name, getattr(flash, name), raising=False)
    monkeypatch.setattr(flash_attn, "get_flash_attn_version", lambda *args, **options: 3)


def vllm_config(setting: dict[str, Any] | None, **options: Any) -> Any:
    """What an engine on trace-1 would be configured as."""
    from vllm.engine.arg_utils import EngineArgs

    given = {"dtype": "float32", "max_model_len": 512, "skip_tokenizer_init": True, **options}
    extra = {} if setting is None else {"kvkeep": setting}
    return EngineArgs(
        model=str(shipped_model("trace-1")), additional_config=extra, **given
    ).create_engine_config()


def make_engine(policy: str, dtype: str, prompt: str = "counts") -> Engine:
    """Layers, spec, builder and a cache full of what others left."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.worker.utils import customize_attention_spec

    from kvkeep.serving.cuda import BoundedFlashBackend

    config = vllm_config(
        {"policy": policy, "budget": BUDGET, "buffer": BUFFER, "prompt": prompt}, dtype=dtype
    )
    config.cache_config.block_size = SLOTS
    heads = config.model_config.get_num_attention_heads(config.parallel_config)
    kv_heads = config.model_config.get_num_kv_heads(config.parallel_config)
    assert config.model_config.get_head_size() == DIM
    default = torch.get_default_dtype()
    torch.set_default_dtype(config.model_config.dtype)
    try:
        with set_current_vllm_config(config):
            full, sliding = (
                Attention(
                    heads,
                    DIM,
                    DIM**-0.5,
                    kv_heads,
                    cache_config=config.cache_config,
                    prefix=f"model.layers.{layer}.self_attn.attn",
                    per_layer_sliding_window=window,
                    attn_backend=BoundedFlashBackend,
                )
                for layer, window in ((1, None), (2, 24))
            )
    finally:
        torch.set_default_dtype(default)
    spec = customize_attention_spec(BoundedFlashBackend, full.get_kv_cache_spec(config))
    builder = BoundedFlashBackend.get_builder_cls()(spec, [full.layer_name], config, torch.device("cpu"))
    cache = 50 * torch.randn(BLOCKS, kv_heads, SLOTS, 2 * DIM, dtype=config.model_config.dtype)
    return Engine(config, full, sliding, spec, builder, cache)
