"""Files that may hold published gates: which they are, and the gate tensors in them."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvkeep.core.errors import DataFileError

#: The file of a published checkpoint.
WEIGHTS = "trimkv_weights.pth"
#: Part of the name of every gate tensor.
MARK = "retention_gate"
_PICKLED = (".pth", ".pt", ".bin")


def is_published(path: Path) -> bool:
    """Whether a path looks like a published checkpoint and not like a file of kvkeep's own."""
    if path.is_dir() or path.suffix in _PICKLED:
        return True
    if path.suffix != ".safetensors" or not path.is_file():
        return False
    try:
        with safe_open(path, framework="pt") as file:
            own = "kvkeep" in (file.metadata() or {})
            return not own and any(MARK in name for name in file.keys())  # noqa: SIM118
    except (SafetensorError, OSError):
        return False


def gather(path: Path) -> dict[str, Tensor]:
    """All gate tensors of a file, or of the files of a folder, by their full names.

    Raises
    ------
    DataFileError
        If there is no file, none that can be read, no gate tensor, or one of them twice.
    """
    if not path.exists():
        raise DataFileError(f"there is no gate checkpoint at {path}.")
    files = [path]
    if path.is_dir():
        own = path / WEIGHTS
        files = [own] if own.is_file() else sorted(path.glob("*.safetensors")) or sorted(path.glob("*.bin"))
    found: dict[str, Tensor] = {}
    for file in files:
        part = _read(file)
        if twice := sorted(set(part) & set(found)):
            raise DataFileError(f"{path} has {twice[0]} in two files: name the file that is meant.")
        found |= part
    if not found:
        raise DataFileError(
            f"{path} holds no retention gates: give the folder that holds {WEIGHTS}, or a file with tensors "
            f"named layers.N.self_attn.{MARK}."
        )
    return found


def _read(file: Path) -> dict[str, Tensor]:
    """The gate tensors of one file; of a file of gates alone, all there is."""
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as opened:
                return {name: opened.get_tensor(name) for name in opened.keys() if MARK in name}  # noqa: SIM118
        held = torch.load(file, map_location="cpu", weights_only=True)  # plain tensors: no code is run
    except (SafetensorError, OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataFileError(f"{file} cannot be read as a checkpoint ({reason}): get it again.") from error
    if not isinstance(held, Mapping) or not all(isinstance(each, Tensor) for each in held.values()):
        raise DataFileError(
            f"{file} is not a state dict of tensors: give the checkpoint as it was published."
        )
    others = [name for name in held if MARK not in name]
    if others and file.name == WEIGHTS:
        raise DataFileError(
            f"{file} was trained in more than its gates ({others[0]} and {len(others) - 1} more): kvkeep "
            "leaves the model as it is, so these gates would not fit."
        )
    return {name: tensor for name, tensor in held.items() if MARK in name}
