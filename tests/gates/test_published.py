"""Published checkpoints: what their code saves gives what their modules compute, and nothing is guessed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from kvkeep import gates as kv_gates
from kvkeep.core.errors import DataFileError
from kvkeep.engine.spec import model_spec
from kvkeep.gates import GateShape, RetentionGates
from kvkeep.testing.models import tiny_model
from tests.gates.published import PREFIX, publish, their_names

SPEC = model_spec(tiny_model("llama").config)
VARIANTS: dict[str, dict[str, Any]] = {
    "rg": {"architecture": "rg"},
    "rg10": {"architecture": "rg10"},
    "rg10 untied": {"architecture": "rg10", "tied": False},
}


def gates_of(variant: str) -> RetentionGates:
    """Small random gates of a tiny model."""
    torch.manual_seed(5)
    made = RetentionGates(GateShape.of(SPEC, width=12, **VARIANTS[variant]))
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return made


def their_forward(state: dict[str, Tensor], layer: int, hidden: Tensor) -> Tensor:
    """Their module, written from its own tensors."""
    own = f"{PREFIX}layers.{layer}.self_attn.retention_gate."
    x = F.silu(hidden @ state[own + "linear1.weight"].T + state[own + "linear1.bias"])
    last = "linear2.weight"
    if own + "linear3.weight" in state:
        x = F.silu(x @ state[own + "linear2.weight"].T + state[own + "linear2.bias"])
        last = "linear3.weight"
    return F.logsigmoid(x @ state[own + last].T + state[own + "bias"]).transpose(1, 2)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_published_folder(variant: str, tmp_path: Path) -> None:
    """Read as it is, it computes what it was trained to; tied again only where the copies are equal."""
    gates, hidden = gates_of(variant), torch.randn(2, 5, 64)
    read = kv_gates.load(publish(gates, tmp_path / "checkpoint"), SPEC, base_sha256="0" * 64)
    assert read.shape == gates.shape
    assert read.base is None
    state = their_names(gates)
    for layer in (0, 1):
        assert torch.allclose(read(layer, hidden), their_forward(state, layer, hidden), atol=1e-5)
    kv_gates.save(read, tmp_path / "own")
    assert kv_gates.load(tmp_path / "own", SPEC).sha256 == read.sha256


def test_half_precision_and_copies(tmp_path: Path) -> None:
    """As released: bfloat16, every layer with a copy of the shared projection."""
    gates = gates_of("rg10").bfloat16()
    read = kv_gates.load(publish(gates, tmp_path / "checkpoint"))
    assert read.shape.tied
    assert all(
        torch.equal(each, gates.state_dict()[name].float()) for name, each in read.state_dict().items()
    )


def test_a_shared_projection_that_stands_there_once(tmp_path: Path) -> None:
    """Safetensors drop copies of a shared tensor: the layer that kept it speaks for all."""
    gates = gates_of("rg10")
    save_file(their_names(gates, once=True), tmp_path / "gates.safetensors")
    read = kv_gates.load(tmp_path / "gates.safetensors", SPEC)
    assert read.shape == gates.shape
    assert read.sha256 == gates.sha256


def test_a_whole_model_in_parts(tmp_path: Path) -> None:
    """The gates are picked out of the model's own weights, from all files, under another prefix."""
    gates = gates_of("rg")
    names = their_names(gates, "model.language_model.")
    halves = [{name: each for name, each in names.items() if f"layers.{layer}." in name} for layer in (0, 1)]
    for place, half in enumerate(halves):
        weights = {f"model.layers.{place}.self_attn.q_proj.weight": torch.zeros(4, 4)}
        save_file(half | weights, tmp_path / f"model-{place}.safetensors")
    assert kv_gates.load(tmp_path, SPEC).sha256 == gates.sha256


def test_the_text_part_of_a_config(tmp_path: Path) -> None:
    """Models of images and text keep the sizes of their decoder one level down."""
    gates = gates_of("rg10")
    folder = publish(gates, tmp_path / "checkpoint")
    inner = json.loads((folder / "config.json").read_text())
    outer = {"model_type": "outer", "trainable_params": "self_attn.retention_gate", "text_config": inner}
    (folder / "config.json").write_text(json.dumps(outer))
    assert kv_gates.load(folder, SPEC).shape == gates.shape


def without(part: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """Drop the tensors with a part in their names."""
    return lambda state: {name: each for name, each in state.items() if part not in name}


def adding(name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """Add a tensor."""
    return lambda state: state | {name: torch.zeros(2)}


GATE = "model.layers.0.self_attn.retention_gate."


class TestRefused:
    """Ambiguous, incomplete or foreign checkpoints, each with the reason."""

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            (without("layers.1.self_attn.retention_gate.linear1.bias"), "lacks 1 of the 12 .* of layer 1"),
            (
                without("retention_gate.bias"),
                "lacks 2 of the 12 tensors of its 'rg10' gates, bias of layer 0",
            ),
            (adding(GATE + "input_norm.weight"), "no tensor of 'rg' or 'rg10' gates"),
            (adding(GATE + "linear3.bias"), "has linear3.bias in layer 0"),
            (adding("other." + GATE + "bias"), "gates of several models"),
            (adding("model.layers.0.self_attn.q_proj.weight"), "trained in more than its gates"),
            (lambda state: {}, "holds no retention gates"),
            (lambda state: {"a": 1}, "is not a state dict of tensors"),
            (lambda state: state | {GATE + "linear2.bias": torch.zeros(5)}, "is not a whole gate file"),
            (lambda state: state | {GATE + "bias": torch.full((2,), torch.nan)}, "a number is not finite"),
        ],
    )
    def test_tensors(self, change: Callable[[dict[str, Tensor]], Any], reason: str, tmp_path: Path) -> None:
        folder = publish(gates_of("rg10"), tmp_path / "checkpoint")
        torch.save(change(their_names(gates_of("rg10"))), folder / "trimkv_weights.pth")
        with pytest.raises(DataFileError, match=reason):
            kv_gates.load(folder, SPEC)

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"retention_gate": "rg2"}, "names gates 'rg2', and the tensors are those of 'rg10'"),
            (
                {"trainable_params": "self_attn.retention_gate|self_attn.k_proj"},
                "self_attn.k_proj of the model",
            ),
            ({"skip_layers": 1}, "first 1 layers are meant to keep everything"),
            ({"num_key_value_heads": 4}, "gates for 2 KV heads, and the model has 4"),
            ({"model_type": "qwen3"}, "made for model_type 'qwen3', the model has 'llama'"),
        ],
    )
    def test_configs(self, changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
        folder = publish(gates_of("rg10"), tmp_path / "checkpoint", **changes)
        with pytest.raises(DataFileError, match=reason):
            kv_gates.load(folder, SPEC)

    def test_other_sizes(self, tmp_path: Path) -> None:
        """A checkpoint of a larger model of the family."""
        shape = dataclasses.replace(gates_of("rg").shape, hidden_size=32, layers=(0, 1, 2))
        folder = publish(RetentionGates(shape), tmp_path / "checkpoint")
        with pytest.raises(DataFileError, match=r"hidden_size 32.*layers \(0, 1, 2\)"):
            kv_gates.load(folder, SPEC)

    def test_nobody_says_whose(self, tmp_path: Path) -> None:
        """Without config and model only sizes are known; with the model it can be read."""
        path = publish(gates_of("rg"), tmp_path / "checkpoint") / "trimkv_weights.pth"
        (path.parent / "config.json").unlink()
        with pytest.raises(DataFileError, match=r"put the published config\.json beside it"):
            kv_gates.load(path)
        assert kv_gates.load(path, SPEC).sha256 == gates_of("rg").sha256
        (path.parent / "config.json").write_text("[")
        with pytest.raises(DataFileError, match="cannot be read as a model's config"):
            kv_gates.load(path)

    def test_the_same_gates_twice(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            save_file(their_names(gates_of("rg")), tmp_path / f"{name}.safetensors")
        with pytest.raises(DataFileError, match="in two files: name the file that is meant"):
            kv_gates.load(tmp_path, SPEC)
        assert kv_gates.load(tmp_path / "a.safetensors", SPEC).shape.architecture == "rg"

    def test_files_that_are_none(self, tmp_path: Path) -> None:
        """Missing, cut off, or a pickle that would run code."""
        with pytest.raises(DataFileError, match="no gate checkpoint at"):
            kv_gates.load(tmp_path / "gates.pth")
        path = publish(gates_of("rg"), tmp_path / "checkpoint") / "trimkv_weights.pth"
        path.write_bytes(path.read_bytes()[:500])
        with pytest.raises(DataFileError, match="cannot be read as a checkpoint"):
            kv_gates.load(path.parent)
        torch.save({"weight": Path("a")}, path)
        with pytest.raises(DataFileError, match="cannot be read as a checkpoint"):
            kv_gates.load(path.parent)
