"""Gates as their authors publish them: a folder or file of ngocbh/trimkv, read from the disk only.

What is read, under any prefix (``model.``, ``model.language_model.``), ``N`` the layer:

====================================================  =======  =========  =====================
name in the checkpoint                                rg       rg10       here
====================================================  =======  =========  =====================
``layers.N.self_attn.retention_gate.linear1.weight``  D → 512  D → 512    ``first``
``layers.N.self_attn.retention_gate.linear1.bias``    512      512        ``first``
``layers.N.self_attn.retention_gate.linear2.weight``  512 → H  512 → 512  ``out``, rg10 ``second``
``layers.N.self_attn.retention_gate.linear2.bias``    none     512        ``second``
``layers.N.self_attn.retention_gate.linear3.weight``  none     512 → H    ``out``, or shared
``layers.N.self_attn.retention_gate.bias``            H        H          ``out``, or shared
====================================================  =======  =========  =====================

The published folders hold ``trimkv_weights.pth`` (the state dict of the gates alone, by ``torch.save``)
and ``config.json`` (the base model's, with ``retention_gate``, ``base_model``, ``trainable_params`` and
``tie_retention_gate_layers`` beside its own fields). A whole model that was saved with its gates in it is
read too. A last projection that ``rg10`` shares may stand there once per layer (as state dicts have it),
equal or not, or once in all (as safetensors drop copies).

Source
------
Names and files: modelling and training code of ngocbh/trimkv as public repositories hold it. Sizes on record
for two released checkpoints agree with them: 94.7 MB for ``rg``, 113 MB in 216 tensors for ``rg10``, both of
Qwen3-4B in bfloat16. No released file was at hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from kvkeep.core.errors import DataFileError
from kvkeep.core.spec import ModelSpec
from kvkeep.gates.checkpoint import MARK, gather
from kvkeep.gates.shape import Architecture, GateShape, activation_of

_NAME = re.compile(rf"^(.*?)layers\.(\d+)\.self_attn\.{MARK}\.(linear[123]\.(?:weight|bias)|bias)$")
_OURS: dict[Architecture, dict[str, str]] = {
    "rg": {
        "linear1.weight": "first.weight",
        "linear1.bias": "first.bias",
        "linear2.weight": "out.weight",
        "bias": "out.bias",
    },
    "rg10": {
        "linear1.weight": "first.weight",
        "linear1.bias": "first.bias",
        "linear2.weight": "second.weight",
        "linear2.bias": "second.bias",
        "linear3.weight": "out.weight",
        "bias": "out.bias",
    },
}


def read_published(path: Path, spec: ModelSpec | None) -> tuple[GateShape, dict[str, Tensor]]:
    """Read a published checkpoint.

    Parameters
    ----------
    path
        The folder, or a file of it; ``config.json`` is looked for beside the file.
    spec
        Of the model, where there is no config.

    Returns
    -------
    tuple
        Sizes, untied, and tensors by the names of :class:`~kvkeep.gates.RetentionGates`, a last projection
        for every layer.

    Raises
    ------
    DataFileError
        If there are no gates, some are missing, unknown or ambiguous, or nothing says of which model they
        are.
    """
    folder = path if path.is_dir() else path.parent
    config = _config(folder / "config.json")
    tensors = gather(path)
    known = _by_layer(path, tensors)
    layers = tuple(sorted({layer for layer, _ in known}))
    architecture: Architecture = "rg10" if any(name == "linear3.weight" for _, name in known) else "rg"
    _check_config(path, config, architecture)
    names = _OURS[architecture]
    if architecture == "rg10":
        known = _unroll(known, layers)
    wanted = {(layer, name) for layer in layers for name in names}
    if missing := sorted(wanted - set(known)):
        raise DataFileError(
            f"{path} lacks {len(missing)} of the {len(wanted)} tensors of its {architecture!r} "
            f"gates, {missing[0][1]} of layer {missing[0][0]} among them: get the checkpoint again."
        )
    if unknown := sorted(set(known) - wanted):
        raise DataFileError(
            f"{path} has {unknown[0][1]} in layer {unknown[0][0]}, which {architecture!r} gates do not "
            "have: it is not one of the architectures that kvkeep knows (rg, rg10)."
        )
    ours = {f"layers.{layer}.{names[name]}": tensor for (layer, name), tensor in known.items()}
    return _shape(path, ours, layers, architecture, config, spec), ours


def _by_layer(path: Path, tensors: Mapping[str, Tensor]) -> dict[tuple[int, str], Tensor]:
    """Tensors by layer and name, from one model."""
    known: dict[tuple[int, str], Tensor] = {}
    prefixes = set()
    for full, tensor in tensors.items():
        match = _NAME.match(full)
        if match is None:
            raise DataFileError(
                f"{path} holds {full}, which is no tensor of 'rg' or 'rg10' gates: kvkeep knows these two "
                "architectures."
            )
        prefixes.add(match[1])
        known[int(match[2]), match[3]] = tensor
    if len(prefixes) > 1:
        raise DataFileError(
            f"{path} holds the gates of several models ({sorted(prefixes)}): keep one of them."
        )
    return known


def _unroll(
    known: Mapping[tuple[int, str], Tensor], layers: tuple[int, ...]
) -> dict[tuple[int, str], Tensor]:
    """Give every layer the last projection that a checkpoint holds only once."""
    whole = dict(known)
    for name in ("linear3.weight", "bias"):
        holders = [layer for layer in layers if (layer, name) in known]
        if len(holders) == 1:
            whole |= {(layer, name): known[holders[0], name] for layer in layers}
    return whole


def _config(path: Path) -> dict[str, Any]:
    """The text part of a config with the fields around it; empty if there is none."""
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        return {**config, **config.get("text_config", {})}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise DataFileError(f"{path} cannot be read as a model's config ({error}): get it again.") from error


def _check_config(path: Path, config: Mapping[str, Any], architecture: str) -> None:
    """Refuse what the config says is something else than the tensors look like."""
    named = config.get(MARK, architecture)
    if named != architecture:
        raise DataFileError(
            f"{path}: the config names gates {named!r}, and the tensors are those of {architecture!r}; "
            "kvkeep knows rg and rg10."
        )
    trained = [part for part in str(config.get("trainable_params") or MARK).split("|") if MARK not in part]
    if trained:
        raise DataFileError(
            f"{path}: the config says that {', '.join(trained)} of the model was trained too; kvkeep leaves "
            "the model as it is, so these gates would not fit."
        )
    if config.get("skip_layers"):
        raise DataFileError(
            f"{path}: its first {config['skip_layers']} layers are meant to keep everything (skip_layers), "
            "which kvkeep's policies do not do."
        )


def _shape(
    path: Path,
    tensors: Mapping[str, Tensor],
    layers: tuple[int, ...],
    architecture: Architecture,
    config: Mapping[str, Any],
    spec: ModelSpec | None,
) -> GateShape:
    """Sizes from the tensors, the model from the config, or from the model at hand."""
    width, hidden = tensors[f"layers.{layers[0]}.first.weight"].shape
    rows = len(tensors[f"layers.{layers[0]}.out.bias"])
    if "model_type" in config:
        heads = config.get("num_key_value_heads") or config.get("num_attention_heads") or rows
        model_type, activation = config["model_type"], config.get("hidden_act") or "silu"
    elif spec is not None:
        heads, model_type, activation = spec.kv_heads, spec.model_type, activation_of(spec.config)
    else:
        raise DataFileError(
            f"{path} does not say of which model its gates are: put the published config.json beside it, or "
            "load it with the model's spec."
        )
    if rows not in (1, heads):
        raise DataFileError(f"{path} has gates for {rows} KV heads, and the model has {heads}.")
    return GateShape(
        architecture=architecture,
        tied=False,
        scalar=rows == 1 < heads,
        width=width,
        activation=activation,
        model_type=model_type,
        hidden_size=hidden,
        kv_heads=heads,
        layers=layers,
    )
