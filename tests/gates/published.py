"""Checkpoints as the authors' code writes them, made from gates of ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvkeep.gates import RetentionGates

PREFIX = "model."
_THEIRS = {
    "rg": {"first.weight": "linear1.weight", "first.bias": "linear1.bias", "out.weight": "linear2.weight"},
    "rg10": {
        "first.weight": "linear1.weight",
        "first.bias": "linear1.bias",
        "second.weight": "linear2.weight",
        "second.bias": "linear2.bias",
        "out.weight": "linear3.weight",
    },
}


def their_names(gates: RetentionGates, prefix: str = PREFIX, *, once: bool = False) -> dict[str, Tensor]:
    """The state dict of their modules: a shared projection under every layer, or only ``once``."""
    state, names = gates.state_dict(), _THEIRS[gates.shape.architecture] | {"out.bias": "bias"}
    found = {}
    for place, layer in enumerate(gates.shape.layers):
        for ours, theirs in names.items():
            shared = gates.shape.tied and ours.startswith("out.")
            if shared and once and place:
                continue
            own = ours.replace("out.", "shared.") if shared else f"layers.{layer}.{ours}"
            found[f"{prefix}layers.{layer}.self_attn.retention_gate.{theirs}"] = state[own].clone()
    return found


def config_of(gates: RetentionGates) -> dict[str, Any]:
    """The fields of their config that say whose gates these are."""
    shape = gates.shape
    return {
        "model_type": shape.model_type,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": 4,
        "num_key_value_heads": shape.kv_heads,
        "hidden_act": shape.activation,
        "retention_gate": shape.architecture,
        "retention_gate_intermediate_size": shape.width,
        "trainable_params": "self_attn.retention_gate",
        "tie_retention_gate_layers": True,
        "base_model": "someone/some-model",
    }


def publish(gates: RetentionGates, folder: Path, **changes: Any) -> Path:
    """A folder as the authors publish it."""
    folder.mkdir()
    torch.save(their_names(gates), folder / "trimkv_weights.pth")
    (folder / "config.json").write_text(json.dumps(config_of(gates) | changes))
    return folder
