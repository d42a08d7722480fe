"""Requests with an adapter: it changes keys and values, and evictions see what it made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import kvkeep
from tests.serving.engine.conftest import prompts
from tests.serving.engine.reference import overlap, read
from tests.serving.engine.running import MODEL, engine

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm has an environment for it")

BUDGET, BUFFER, NEW = 96, 32, 80
LENGTHS = (40, 150, 201)
RANK, ALPHA = 4, 8
MODULES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj")
OPTIONS = {"enable_lora": True, "max_lora_rank": 8, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random adapter in PEFT's form, written by hand."""
    folder = tmp_path_factory.mktemp("adapter")
    source = torch.Generator().manual_seed(5)
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    tensors: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if name.endswith(MODULES):
            sizes = {"A": (RANK, module.in_features), "B": (module.out_features, RANK)}
            for letter, shape in sizes.items():
                made = 0.1 * torch.randn(shape, generator=source)
                tensors[f"base_model.model.{name}.lora_{letter}.weight"] = made
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": MODEL,
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": [module.rpartition(".")[2] for module in MODULES],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def merged(adapter: Path) -> Any:
    """The model with the adapter in its weights."""
    from safetensors.torch import load_file

    tensors = load_file(adapter / "adapter_model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    for name, module in model.named_modules():
        if name.endswith(MODULES):
            down, up = (tensors[f"base_model.model.{name}.lora_{letter}.weight"] for letter in "AB")
            module.weight.data += ALPHA / RANK * up @ down
    return model


def test_entries_are_those_that_the_adapter_made(adapter: Path, merged: Any, model: Any) -> None:
    """A request with an adapter would be evicted as if it had none, or drag its neighbours along."""
    from vllm.lora.request import LoRARequest

    own = LoRARequest("tiny", 1, str(adapter))
    with engine({"policy": "snapkv", "budget": BUDGET, "buffer": BUFFER}, **OPTIONS) as bounded:
        adapted = bounded.answer(prompts(*LENGTHS), NEW, look=True, lora=own)
        plain = bounded.answer(prompts(*LENGTHS), NEW, look=True)
        assert bounded.empty
    policy = kvkeep.policy("snapkv", budget=BUDGET, buffer=BUFFER, prefill="chunk")
    for answers, weights, others in ((adapted, merged, model), (plain, model, merged)):
        readings = [read(weights, policy, answer) for answer in answers]
        assert [reading.mismatches for reading in readings] == [0] * len(answers)
        shares = [overlap(mine.held, its.held) for mine, its in zip(answers, readings, strict=True)]
        assert min(shares) > 0.99
        assert sum(read(others, policy, answer).mismatches for answer in answers) > 0
        assert sum(read(weights, None, answer).mismatches for answer in answers) > 0


def test_nothing_evicted_nothing_changed(adapter: Path) -> None:
    """With room for everything an adapter's answers would be others than vLLM's own."""
    from vllm.lora.request import LoRARequest

    own = LoRARequest("tiny", 1, str(adapter))
    found = []
    for setting in (None, {"policy": "snapkv", "budget": 900, "buffer": BUFFER}):
        with engine(setting, **OPTIONS) as running:
            found.append([answer.tokens for answer in running.answer(prompts(*LENGTHS), NEW, lora=own)])
    assert found[0] == found[1]
