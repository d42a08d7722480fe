"""Retention gates: the published architectures, and files that say whose they are."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kvkeep import gates as kv_gates
from kvkeep.core.errors import ConfigError, DataFileError
from kvkeep.core.files import read_tensors, write_tensors
from kvkeep.engine.spec import model_spec
from kvkeep.gates import GateShape, RetentionGates
from kvkeep.testing.models import tiny_model

VARIANTS: dict[str, dict[str, Any]] = {
    "rg": {"architecture": "rg"},
    "rg10": {"architecture": "rg10"},
    "rg10 untied": {"architecture": "rg10", "tied": False},
    "rg10 scalar": {"architecture": "rg10", "scalar": True},
    "rg scalar": {"architecture": "rg", "scalar": True},
}


def gates_of(variant: str, family: str = "llama", seed: int = 0) -> RetentionGates:
    """Small random gates of a tiny model."""
    torch.manual_seed(seed)
    shape = GateShape.of(model_spec(tiny_model(family).config), width=12, **VARIANTS[variant])
    made = RetentionGates(shape)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return made


def by_hand(gates: RetentionGates, layer: int, hidden: torch.Tensor) -> torch.Tensor:
    """The definition, from the tensors by name."""
    state = {name: tensor.double() for name, tensor in gates.state_dict().items()}
    own = f"layers.{layer}."
    x = F.silu(hidden.double() @ state[own + "first.weight"].T + state[own + "first.bias"])
    if gates.shape.architecture == "rg10":
        x = F.silu(x @ state[own + "second.weight"].T + state[own + "second.bias"])
    last = "shared." if gates.shape.tied else own + "out."
    z = x @ state[last + "weight"].T + state[last + "bias"]
    return -torch.log1p(torch.exp(-z)).transpose(1, 2)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_published_architecture(variant: str) -> None:
    """Layer by layer; one row per KV head, or one for all."""
    gates, hidden = gates_of(variant), torch.randn(2, 5, 64)
    for layer in (0, 1):
        ours = gates(layer, hidden)
        assert ours.shape == (2, 2, 5)
        assert ours.dtype == torch.float32
        assert torch.allclose(ours.double(), by_hand(gates, layer, hidden).expand(2, 2, 5), atol=1e-5)
    assert not torch.equal(gates(0, hidden), gates(1, hidden))
    assert len(gates.projections()) == (1 if gates.shape.tied else 2)


def test_a_fresh_gate_forgets_nothing() -> None:
    """Training starts from the full-cache model: beta = 1 - 1.5e-8, which float32 cannot hold."""
    spec = model_spec(tiny_model("llama").config)
    log_beta = RetentionGates(GateShape.of(spec))(0, torch.randn(1, 3, 64))
    assert log_beta.abs().max().item() == pytest.approx(1.5e-8, rel=0.2)
    assert bool((log_beta < 0).all())
    size = sum(each.numel() for each in RetentionGates(GateShape.of(spec, "rg")).layers["0"].parameters())
    assert size == 64 * 512 + 512 + 512 * 2 + 2


def test_half_precision_models() -> None:
    """Hidden states come in the model's type; log beta is float32 in any case."""
    gates, hidden = gates_of("rg10"), torch.randn(1, 4, 64)
    half = gates(1, hidden.bfloat16())
    assert half.dtype == torch.float32
    assert torch.allclose(half, gates(1, hidden), atol=0.2)
    assert gates.bfloat16()(1, hidden).dtype == torch.float32


def test_gates_train() -> None:
    """Part of the promise: plain modules, with gradients through the shared projection too."""
    gates = gates_of("rg10")
    (gates(0, torch.randn(1, 4, 64)).sum() + gates(1, torch.randn(1, 4, 64)).sum()).backward()
    assert all(parameter.grad is not None for parameter in gates.parameters())


@pytest.mark.parametrize("variant", VARIANTS)
def test_files(variant: str, tmp_path: Path) -> None:
    """What is read is what was written, shape and all; ready for inference."""
    gates, hidden = gates_of(variant), torch.randn(2, 5, 64)
    path = tmp_path / "gates.safetensors"
    kv_gates.save(gates, path, training={"steps": 3})
    again = kv_gates.load(path, model_spec(tiny_model("llama").config))
    assert again.shape == gates.shape
    assert again.sha256 == gates.sha256
    assert torch.equal(again(1, hidden), gates(1, hidden))
    assert not any(parameter.requires_grad for parameter in again.parameters())
    assert read_tensors(path, "gates")[1]["training"] == {"steps": 3}


def test_files_say_whose_gates_they_are(tmp_path: Path) -> None:
    """By hash of the base model's weights: asked for, handed on when saved again, and not needed."""
    gates, path = gates_of("rg10"), tmp_path / "gates.safetensors"
    kv_gates.save(gates, path, base_sha256="a" * 64, training={"steps": 3})
    assert kv_gates.load(path, base_sha256="a" * 64).base == "a" * 64
    assert kv_gates.load(path, base_sha256=iter(["b" * 64, "a" * 64])).base == "a" * 64
    kv_gates.save(kv_gates.load(path), path)
    for wrong in ("b" * 64, ["b" * 64, "c" * 64]):
        with pytest.raises(
            DataFileError, match="weights have SHA-256 aaaaaaaaaaaa…, and this model's have bbbb"
        ):
            kv_gates.load(path, base_sha256=wrong)
    kv_gates.save(gates, path)
    assert kv_gates.load(path, base_sha256="b" * 64).base is None


def unrolled(gates: RetentionGates, path: Path, shift: float = 0.0) -> None:
    """Write a shared projection once per layer, as one released checkpoint has it."""
    state = gates.state_dict()
    weight, bias = state.pop("shared.weight"), state.pop("shared.bias")
    for place, layer in enumerate(gates.shape.layers):
        state |= {f"layers.{layer}.out.weight": weight + shift * place, f"layers.{layer}.out.bias": bias}
    state = {name: tensor.clone() for name, tensor in state.items()}
    shape = dataclasses.asdict(gates.shape) | {"layers": list(gates.shape.layers)}
    write_tensors(path, "gates", state, {"format": 1, "shape": shape})


def test_an_unrolled_projection_is_tied_again(tmp_path: Path) -> None:
    """Equal copies are one projection; different ones are a checkpoint that came untied, and stay so."""
    gates, hidden, path = gates_of("rg10"), torch.randn(2, 5, 64), tmp_path / "unrolled.safetensors"
    unrolled(gates, path)
    again = kv_gates.load(path)
    assert again.shape.tied
    assert torch.equal(again(1, hidden), gates(1, hidden))
    unrolled(gates, path, shift=0.1)
    apart = kv_gates.load(path)
    assert not apart.shape.tied
    assert torch.equal(apart(0, hidden), gates(0, hidden))
    assert not torch.equal(apart(1, hidden), gates(1, hidden))


class TestMistakes:
    """Every message says whose gates these are, or what is broken."""

    def test_another_model(self, tmp_path: Path) -> None:
        path = tmp_path / "gates.safetensors"
        kv_gates.save(gates_of("rg10"), path)
        with pytest.raises(DataFileError, match="made for model_type 'llama', the model has 'qwen3'"):
            kv_gates.load(path, model_spec(tiny_model("qwen3").config))

    def test_another_size(self) -> None:
        shape = GateShape.of(model_spec(tiny_model("llama").config))
        other = dataclasses.replace(shape, hidden_size=32, layers=(0, 1, 2))
        reasons = other.check(model_spec(tiny_model("llama").config))
        assert reasons == [
            "the gates were made for hidden_size 32, the model has 64",
            "the gates were made for layers (0, 1, 2), the model has (0, 1)",
        ]

    def test_a_broken_file(self, tmp_path: Path) -> None:
        path = tmp_path / "gates.safetensors"
        gates = gates_of("rg10")
        state = gates.state_dict()
        shape = dataclasses.asdict(gates.shape) | {"layers": [0, 1]}
        for tensors, facts in (
            ({k: v for k, v in state.items() if k != "layers.1.first.bias"}, {"shape": shape}),
            (state | {"shared.bias": torch.full((2,), torch.nan)}, {"shape": shape}),
            (state, {"shape": shape | {"width": 13}}),
            (state, {"shape": shape | {"architecture": "rg3"}}),
            (state, {}),
        ):
            write_tensors(path, "gates", tensors, {"format": 1, **facts})
            with pytest.raises(DataFileError, match="is not a whole gate file"):
                kv_gates.load(path)
        write_tensors(path, "gates", state, {"format": 7})
        with pytest.raises(DataFileError, match="has gate format 7; this version reads 1"):
            kv_gates.load(path)
        write_tensors(path, "calibration", state, {})
        with pytest.raises(DataFileError, match="is 'calibration', not a gates file"):
            kv_gates.load(path)

    def test_a_shape_that_contradicts_itself(self) -> None:
        spec = model_spec(tiny_model("llama").config)
        with pytest.raises(ConfigError, match="'rg' have no shared projection"):
            GateShape.of(spec, "rg", tied=True)
        with pytest.raises(ConfigError, match="architecture 'rg2' is none of"):
            GateShape.of(spec, "rg2")  # type: ignore[arg-type]


def test_the_folder_of_a_training_that_is_not_done(tmp_path: Path) -> None:
    (tmp_path / "checkpoint.pt").touch()
    with pytest.raises(DataFileError, match=r"has not come to its end: .* --resume"):
        kv_gates.load(tmp_path)
