"""Reading and writing files so that nothing is ever half-written, and damage is explained.

Tensors are stored as safetensors only (never pickle), with a JSON header of our own.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvkeep.core.errors import DataFileError

_HEADER = "kvkeep"


@contextmanager
def atomic_path(target: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a temporary path beside ``target`` that replaces it when the block succeeds.

    Raises
    ------
    DataFileError
        If the folder does not exist.
    """
    final = Path(target)
    if not final.parent.is_dir():
        raise DataFileError(f"cannot write {final}: the folder {final.parent} does not exist.")
    handle, name = tempfile.mkstemp(prefix=f".{final.name}.", dir=final.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.replace(final)
    finally:
        temporary.unlink(missing_ok=True)


def write_tensors(
    target: str | os.PathLike[str], kind: str, tensors: Mapping[str, Tensor], header: Mapping[str, Any]
) -> None:
    """Write tensors and a header, whole or not at all.

    Parameters
    ----------
    kind
        What the file is, for example ``"calibration"``; reading checks it.
    header
        JSON-ready facts about the tensors.
    """
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps({"kind": kind, "sha256": tensor_digest(whole), **header})
    with atomic_path(target) as temporary:
        save_file(whole, temporary, metadata={_HEADER: text})


def read_tensors(source: str | os.PathLike[str], kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what :func:`write_tensors` wrote.

    Returns
    -------
    tuple
        Tensors by name (on the CPU) and the header.

    Raises
    ------
    DataFileError
        If the file is missing, truncated, damaged, or of another kind.
    """
    path = Path(source)
    if not path.is_file():
        raise DataFileError(f"there is no {kind} file at {path}.")
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get(_HEADER, "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise DataFileError(
            f"{path} is damaged or truncated and cannot be read as a {kind} file ({error}): write it anew."
        ) from error
    if header.get("kind") != kind:
        found = header.get("kind", "no kvkeep file")
        raise DataFileError(f"{path} is {found!r}, not a {kind} file.")
    if header.get("sha256") != tensor_digest(tensors):
        raise DataFileError(f"{path} is damaged: its numbers do not match their checksum. Write it anew.")
    return tensors, header


def kind_of(source: str | os.PathLike[str]) -> str | None:
    """What a file of tensors says it is; ``None`` if it is not there, or none of ours."""
    try:
        with safe_open(Path(source), framework="pt") as file:
            return json.loads((file.metadata() or {}).get(_HEADER, "{}")).get("kind")  # type: ignore[no-any-return]
    except (SafetensorError, OSError, ValueError):
        return None


def tensor_digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names and bytes of tensors."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
