"""What vLLM on CUDA decides about kvkeep's back end before the first step, asked of its own code on a CPU."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.serving.flash_layers import SLOTS, make_engine, twins, vllm_config

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm has an environment for it")
pytestmark = pytest.mark.filterwarnings("default")  # vLLM's own are not ours to mend

SETTING = {"policy": "snapkv", "budget": 40, "buffer": 12}


def _selected(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> str:
    # The build for CPUs lacks the library of CUDA kernels, and none is called here.
    monkeypatch.setitem(sys.modules, "vllm._C_stable_libtorch", ModuleType("vllm._C_stable_libtorch"))
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

    from kvkeep.serving import plugin

    plugin.register()
    monkeypatch.setattr(CudaPlatformBase, "get_device_capability", lambda *args: DeviceCapability(9, 0))
    asked = AttentionSelectorConfig(
        head_size=64, dtype=dtype, kv_cache_dtype="auto", block_size=SLOTS, has_sliding_window=True
    )
    return str(CudaPlatformBase.get_attn_backend_cls(AttentionBackendEnum.CUSTOM, asked))


def test_custom_is_our_back_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flag that the page for operators names would be refused, or mean another back end."""
    assert _selected(monkeypatch, torch.bfloat16) == "kvkeep.serving.cuda.BoundedFlashBackend"
    with pytest.raises(ValueError, match="dtype not supported"):
        _selected(monkeypatch, torch.float32)


def test_blocks_are_not_taken_apart_and_pages_are_contiguous() -> None:
    """A page of one block and head would not be one piece of memory."""
    from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts
    from vllm.v1.kv_cache_interface import KVCacheLayout
    from vllm.v1.worker.utils import select_common_block_size

    from kvkeep.serving.cuda import BoundedFlashBackend

    assert get_supported_kv_cache_layouts([BoundedFlashBackend]) == [KVCacheLayout.LBHNC]
    for size in (16, 32, 48, 128):
        assert select_common_block_size(size, [BoundedFlashBackend]) == size


def test_attention_stays_out_of_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph would replay the rounds of the step that was captured."""
    from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode

    from kvkeep.serving.cuda import BoundedFlashBackend, BoundedFlashBuilder

    twins(monkeypatch)

    def resolved(setting: dict[str, Any] | None) -> Any:
        support = BoundedFlashBuilder.get_cudagraph_support(vllm_config(setting), None)
        compilation = CompilationConfig(
            mode=CompilationMode.VLLM_COMPILE,
            cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
            splitting_ops=list(CompilationConfig._attention_ops),
        )
        return compilation.resolve_cudagraph_mode_and_sizes(support, BoundedFlashBackend.__name__)

    assert resolved(SETTING) == CUDAGraphMode.PIECEWISE
    assert resolved(None) == CUDAGraphMode.FULL_AND_PIECEWISE  # without the setting: stock


def test_only_managed_layers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sliding window has its own bound, and groups of bounded layers must not share one block table."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata
    from vllm.v1.worker.utils import customize_attention_spec

    from kvkeep.serving.cuda import BoundedFlashBackend, BoundedFlashBuilder
    from kvkeep.serving.spec import BoundedSpec
    from tests.serving.test_cuda_twin import common_metadata

    twins(monkeypatch)
    engine = make_engine("snapkv", "float32")
    assert isinstance(engine.spec, BoundedSpec)
    assert engine.full.backend.name == "CUSTOM"
    assert engine.builder.supports_update_block_table is False
    spec = customize_attention_spec(BoundedFlashBackend, engine.sliding.get_kv_cache_spec(engine.config))
    assert type(spec).__name__ == "SlidingWindowSpec"
    builder = BoundedFlashBuilder(spec, [engine.sliding.layer_name], engine.config, torch.device("cpu"))
    common = common_metadata([0, 3], [5, 1], torch.arange(1, 9).int().view(2, 4))
    metadata = builder.build(0, common)
    assert isinstance(metadata, FlashAttentionMetadata)
    assert metadata.block_table is common.block_table_tensor
    heads, kv_heads = engine.full.impl.num_heads, engine.full.impl.num_kv_heads
    query, key, value = (torch.randn(6, count, 64) for count in (heads, kv_heads, kv_heads))
    output = torch.zeros_like(query)
    slots = torch.tensor([*range(16, 21), 83])
    engine.sliding.impl.do_kv_cache_update(engine.sliding, key, value, engine.cache, slots)
    metadata.query_start_loc, metadata.seq_lens = common.query_start_loc_cpu, common.seq_lens_cpu_upper_bound
    metadata.max_seq_len = 5
    engine.sliding.impl.forward(engine.sliding, query, key, value, engine.cache, metadata, output)
    torch.testing.assert_close(output[0], value[0].repeat_interleave(heads // kv_heads, 0))


@pytest.mark.parametrize(
    ("backend", "reason"),
    [(None, "left to vLLM"), ("FLASH_ATTN", "back end is FLASH_ATTN"), ("CUSTOM", None)],
)
def test_the_setting_without_the_back_end(
    backend: str | None, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine would keep everything, and look healthy."""
    import vllm.platforms
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from kvkeep.serving import charge, plugin

    plugin.register()
    config = vllm_config(SETTING)
    config.attention_config.backend = None if backend is None else AttentionBackendEnum[backend]
    cuda = SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: True, device_type="cuda")
    monkeypatch.setattr(vllm.platforms, "current_platform", cuda)
    reasons = charge.objections(config)
    assert len(reasons) == (reason is not None)
    if reason is not None:
        assert reason in reasons[0]
        assert "--attention-backend CUSTOM" in reasons[0]


def test_blocks_tell_nothing_to_model_runner_v2(monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves the blocks of former requests in its table: prompts would seem longer than they are."""
    from kvkeep.core.errors import UnsupportedError
    from kvkeep.serving.deployment import Deployment

    kept = vllm_config({**SETTING, "prompt": "kept"})
    chunked = vllm_config(SETTING)
    assert Deployment.of(kept) is not None
    monkeypatch.setattr(type(kept), "use_v2_model_runner", True)
    assert Deployment.of(chunked) is not None
    with pytest.raises(UnsupportedError, match="VLLM_USE_V2_MODEL_RUNNER=0"):
        Deployment.of(kept)
