"""Gates on disk: one safetensors file with a JSON header that says which model they belong to."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvkeep.core.errors import DataFileError
from kvkeep.core.files import read_tensors, write_tensors
from kvkeep.core.spec import ModelSpec
from kvkeep.gates.checkpoint import is_published
from kvkeep.gates.modules import RetentionGates
from kvkeep.gates.published import read_published
from kvkeep.gates.shape import GateShape

_KIND = "gates"
#: Names of the gates in the folder of their training, and of what is there before they are done.
FILE, CHECKPOINT = "gates.safetensors", "checkpoint.pt"
_FORMAT = 1


def save(
    gates: RetentionGates,
    path: str | os.PathLike[str],
    *,
    base_sha256: str | None = None,
    training: Mapping[str, Any] | None = None,
) -> None:
    """Write gates, whole or not at all.

    Parameters
    ----------
    base_sha256
        Hash of the weights of the model that they were trained beside
        (:func:`kvkeep.evaluation.identity.weights_sha256`). ``None``: what the gates know themselves.
    training
        Where they come from: anything that JSON can hold.
    """
    shape = dataclasses.asdict(gates.shape) | {"layers": list(gates.shape.layers)}
    facts = {
        "format": _FORMAT,
        "shape": shape,
        "base_weights_sha256": gates.base if base_sha256 is None else base_sha256,
        "training": dict(training or {}),
    }
    write_tensors(path, _KIND, gates.state_dict(), facts)


def load_retention(
    path: str | os.PathLike[str],
    spec: ModelSpec | None = None,
    *,
    base_sha256: str | Iterable[str] | None = None,
) -> RetentionGates:
    """Read gates that :func:`save` wrote or that their authors publish, on the CPU and ready for inference.

    A last projection that is meant to be shared may stand in the file once, or once per layer: equal copies
    become one again, different ones are kept as they are.

    Parameters
    ----------
    path
        The file; or a checkpoint of ngocbh/trimkv, folder or file (:mod:`kvkeep.gates.published`).
    spec
        Check right away that the gates fit this model; :class:`~kvkeep.RetentionCache` checks in any case.
    base_sha256
        Hash of the model's weights, or hashes that they may be known by
        (:func:`kvkeep.evaluation.identity.weights_hashes`), read one by one until one is the file's. A file
        that names no hash fits any; then ``base`` of the gates is ``None``.

    Raises
    ------
    DataFileError
        If the file is missing, damaged, of another kind or format, or made for another model: the message
        names what differs.
    """
    place, base = Path(path), None
    if (place / FILE).is_file():  # a folder that `kvkeep gates train` wrote
        place = place / FILE
    elif (place / CHECKPOINT).is_file():
        raise DataFileError(
            f"{path} holds a training of gates that has not come to its end: go on with the command that "
            "began it, and --resume."
        )
    published = read_published(place, spec) if is_published(place) else None
    try:
        if published is None:
            shape, tensors, base = _read_own(place)
        else:
            shape, tensors = published
        shape, tensors = _tie(shape, tensors)
        gates = RetentionGates(shape)
        gates.load_state_dict(tensors)
        gates.base = base
        if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
            raise ValueError("a number is not finite")
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise DataFileError(f"{path} is not a whole gate file ({error}): save the gates again.") from error
    reasons = [] if spec is None else gates.check(spec)
    if spec is not None and reasons:
        raise DataFileError(
            f"{path} does not fit this {spec.model_type!r} model: {'; '.join(reasons)}. Take gates that were "
            "trained for it."
        )
    if base_sha256 is not None and gates.base is not None:
        hashes = [base_sha256] if isinstance(base_sha256, str) else base_sha256
        check_base(path, gates.base, hashes)
    return gates.eval().requires_grad_(False)


def _read_own(path: Path) -> tuple[GateShape, dict[str, Tensor], str | None]:
    """Sizes, tensors and the hash of the base model, of a file of our own."""
    tensors, header = read_tensors(path, _KIND)
    if header.get("format") != _FORMAT:
        raise DataFileError(
            f"{path} has gate format {header.get('format')!r}; this version reads {_FORMAT}: save the gates "
            "with this version of kvkeep."
        )
    facts = dict(header["shape"])
    shape = GateShape(**facts | {"layers": tuple(facts["layers"])})
    return shape, tensors, header.get("base_weights_sha256")


def check_base(path: str | os.PathLike[str], base: str, hashes: Iterable[str]) -> None:
    """Refuse gates that were trained beside other weights.

    Raises
    ------
    DataFileError
        Naming both.
    """
    tried = []
    for each in hashes:
        if each == base:
            return
        tried.append(each)
    own = " or ".join(f"{each[:12]}…" for each in tried)
    raise DataFileError(
        f"{path} was trained beside a model whose weights have SHA-256 {base[:12]}…, and this model's have "
        f"{own}: take the very weights that the gates were trained with, in the same number type, or gates "
        "that were trained for these."
    )


def _tie(shape: GateShape, tensors: dict[str, Tensor]) -> tuple[GateShape, dict[str, Tensor]]:
    """Bring a projection that is written once per layer back to one, if its copies are equal."""
    copies = [(f"layers.{index}.out.weight", f"layers.{index}.out.bias") for index in shape.layers]
    if shape.architecture == "rg" or not all(name in tensors for pair in copies for name in pair):
        return shape, tensors
    weight, bias = (tensors[name] for name in copies[0])
    same = all(torch.equal(tensors[w], weight) and torch.equal(tensors[b], bias) for w, b in copies)
    if not same:
        return dataclasses.replace(shape, tied=False), tensors
    rest = {name: tensor for name, tensor in tensors.items() if ".out." not in name}
    return dataclasses.replace(shape, tied=True), rest | {"shared.weight": weight, "shared.bias": bias}
