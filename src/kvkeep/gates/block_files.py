"""Block gates on disk: one safetensors file with a JSON header that says which model they belong to."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvkeep.core.errors import DataFileError
from kvkeep.core.files import read_tensors, write_tensors
from kvkeep.core.spec import ModelSpec
from kvkeep.gates.block_gates import BlockGates, BlockShape
from kvkeep.gates.files import check_base

KIND = "block-gates"
#: Name of the gates in the folder of their training.
BLOCK_FILE = "block-gates.safetensors"
_FORMAT = 1


def save_blocks(
    gates: BlockGates,
    path: str | os.PathLike[str],
    *,
    base_sha256: str | None = None,
    training: Mapping[str, Any] | None = None,
) -> None:
    """Write gates, whole or not at all; parameters as for :func:`kvkeep.gates.save`."""
    facts = {
        "format": _FORMAT,
        "shape": dataclasses.asdict(gates.shape) | {"layers": list(gates.shape.layers)},
        "base_weights_sha256": gates.base if base_sha256 is None else base_sha256,
        "training": dict(training or {}),
    }
    write_tensors(path, KIND, gates.state_dict(), facts)


def load_blocks(
    path: str | os.PathLike[str],
    spec: ModelSpec | None = None,
    *,
    base_sha256: str | Iterable[str] | None = None,
) -> BlockGates:
    """Read gates that :func:`save_blocks` wrote; parameters as for :func:`kvkeep.gates.load`.

    Raises
    ------
    DataFileError
        If the file is missing, damaged, of another kind or format, or made for another model.
    """
    place = Path(path)
    place = place / BLOCK_FILE if place.is_dir() else place
    tensors, header = read_tensors(place, KIND)
    if header.get("format") != _FORMAT:
        raise DataFileError(
            f"{path} has block-gate format {header.get('format')!r}; this version reads {_FORMAT}: train the "
            "gates with this version of kvkeep."
        )
    try:
        facts = dict(header["shape"])
        gates = BlockGates(BlockShape(**facts | {"layers": tuple(facts["layers"])}))
        gates.load_state_dict(tensors)
        if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
            raise ValueError("a number is not finite")
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise DataFileError(f"{path} is not a whole file of block gates ({error}): train anew.") from error
    gates.base = header.get("base_weights_sha256")
    if spec is not None and (reasons := gates.check(spec)):
        raise DataFileError(
            f"{path} does not fit this {spec.model_type!r} model: {'; '.join(reasons)}. Take gates that were "
            "trained for it."
        )
    if base_sha256 is not None and gates.base is not None:
        check_base(path, gates.base, [base_sha256] if isinstance(base_sha256, str) else base_sha256)
    return gates.eval().requires_grad_(False)
