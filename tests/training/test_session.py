"""Around a training: the model comes back as it was, and nothing outside the recipe decides the result."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from transformers import PreTrainedModel

import kvkeep
from kvkeep.core.errors import ConfigError, UnsupportedError
from kvkeep.engine.attention import attention_name
from kvkeep.testing.models import tiny_model, tokens
from kvkeep.testing.watching import feed
from kvkeep.training import Document, Documents, Recipe, training
from kvkeep.training.session import make_accelerator

RECIPE = Recipe(memory=4, row=24, rows=2, accumulate=2, steps=2, warmup=1, bias=2.0, width=8)


def documents(first: int = 1) -> Documents:
    return Documents(lambda number: Document([first + n % 60 for n in range(20)]), 24, 2, "x")


def gradients(model: PreTrainedModel, **changes: Any) -> dict[str, Tensor]:
    recipe = dataclasses.replace(RECIPE, **changes)
    with training(model, documents(), recipe, "base") as trainer:
        trainer.student(documents().batch(0)).total.backward()
        return {name: each.grad for name, each in trainer.student.gates.named_parameters()}  # type: ignore[misc]


@pytest.fixture
def _fresh_accelerate() -> Iterator[None]:
    """Accelerate keeps its state for the whole process: what a test sets must not reach the next one."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


class TestTheModelIsLeftAsItWas:
    def test_a_cache_in_use_goes_on(self) -> None:
        model, ids = tiny_model("llama"), tokens(1, 12)
        ones = torch.ones_like(ids)
        caches = [kvkeep.RetentionCache(model, kvkeep.SnapKV(budget=8, buffer=2)) for _ in range(2)]
        feed(model, caches[0], ids, ones, [6])
        feed(model, caches[1], ids, ones, [6])
        expected = feed(model, caches[0], ids, ones, [1] * 6)
        attention = attention_name(model)
        gradients(model)
        assert attention_name(model) == attention
        found = feed(model, caches[1], ids, ones, [1] * 6)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))

    @pytest.mark.parametrize("checkpointing", [False, True])
    def test_modes_gradients_and_attention(self, checkpointing: bool) -> None:
        model = tiny_model("llama").train()
        model.model.layers[0].eval()
        model.lm_head.requires_grad_(False)
        modes = [module.training for module in model.modules()]
        asked = [weight.requires_grad for weight in model.parameters()]
        recipe = dataclasses.replace(RECIPE, checkpointing=checkpointing)
        with contextlib.suppress(KeyboardInterrupt), training(model, documents(), recipe, "base") as trainer:
            trainer.train_step()
            raise KeyboardInterrupt
        assert [module.training for module in model.modules()] == modes
        assert [weight.requires_grad for weight in model.parameters()] == asked
        assert attention_name(model) == "sdpa"

    def test_also_if_the_first_text_cannot_be_read(self) -> None:
        model = tiny_model("llama")
        with pytest.raises(IndexError), training(model, documents(first=500), RECIPE, "base"):
            pass
        assert all(weight.requires_grad for weight in model.parameters())
        assert attention_name(model) == "sdpa"

    def test_checkpointing_of_its_own(self) -> None:
        model = tiny_model("llama")
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable()
        layers = model.model.layers
        function = layers[0]._gradient_checkpointing_func
        gradients(model, checkpointing=True)
        assert all(layer.gradient_checkpointing for layer in layers)
        assert layers[0]._gradient_checkpointing_func is function

    def test_random_state(self) -> None:
        torch.manual_seed(77)
        before = torch.get_rng_state()
        gradients(tiny_model("llama"))
        assert torch.equal(torch.get_rng_state(), before)


class TestRefusals:
    """A model that reads on as ever would train gates on nothing, and all losses would look well."""

    def test_attention_that_cannot_be_chosen_by_name(self) -> None:
        config = transformers.FalconConfig(
            vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, bos_token_id=None
        )
        with pytest.raises(UnsupportedError, match="does not choose its attention function by name"):
            gradients(transformers.FalconForCausalLM(config).eval())

    def test_a_layer_that_attends_by_itself(self) -> None:
        model = tiny_model("llama")
        attention = model.model.layers[1].self_attn
        attention.config = copy.deepcopy(model.config)  # what the model is told does not reach it
        with pytest.raises(UnsupportedError, match=r"layers \[1\] do not attend through"):
            gradients(model)


class TestCheckpointing:
    def test_dropout_stays_off(self) -> None:
        found = []
        for checkpointing in (False, True):
            model = tiny_model("llama")
            model.model.layers[0].mlp = nn.Sequential(model.model.layers[0].mlp, nn.Dropout(0.5)).eval()
            found.append(gradients(model, checkpointing=checkpointing))
        for name, grad in found[0].items():
            torch.testing.assert_close(found[1][name], grad, rtol=1e-4, atol=1e-8)

    def test_layers_that_drop_out_by_themselves_are_refused(self) -> None:
        config = transformers.OPTConfig(
            vocab_size=96, hidden_size=32, ffn_dim=32, num_hidden_layers=2, num_attention_heads=2, dropout=0.5
        )
        model = transformers.OPTForCausalLM(config).eval()
        with pytest.raises(UnsupportedError, match="train without checkpointing"):
            gradients(model, checkpointing=True)
        gradients(model)


@pytest.mark.usefixtures("_fresh_accelerate")
class TestTheRecipeDecides:
    def test_the_environment_does_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
        monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "8")
        accelerator = make_accelerator(RECIPE, cpu=True)
        assert accelerator.mixed_precision == "no"
        assert accelerator.gradient_accumulation_steps == 2

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"gradient_accumulation_steps": 1}, "after 1 forwards and the recipe after 2"),
            ({"gradient_accumulation_steps": 2, "mixed_precision": "bf16"}, "computes in bf16"),
        ],
    )
    def test_accelerators_that_say_otherwise(self, options: dict[str, Any], said: str) -> None:
        accelerator = Accelerator(cpu=True, **options)
        with (
            pytest.raises(ConfigError, match=said),
            training(tiny_model("llama"), documents(), RECIPE, "base", accelerator),
        ):
            pass
