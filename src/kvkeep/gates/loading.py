"""Reading gates of either kind: retention gates and block gates."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from kvkeep.core.files import kind_of
from kvkeep.core.spec import ModelSpec
from kvkeep.gates.block_files import BLOCK_FILE, KIND, load_blocks
from kvkeep.gates.block_gates import BlockGates
from kvkeep.gates.files import load_retention
from kvkeep.gates.modules import RetentionGates


def load(
    path: str | os.PathLike[str],
    spec: ModelSpec | None = None,
    *,
    base_sha256: str | Iterable[str] | None = None,
) -> RetentionGates | BlockGates:
    """Read gates: whichever kind the file holds.

    Parameters
    ----------
    path
        A file of :func:`kvkeep.gates.save` or :func:`kvkeep.gates.save_blocks`, the folder of a training, or
        retention gates as their authors publish them.
    spec, base_sha256
        As for :func:`~kvkeep.gates.files.load_retention`.

    Raises
    ------
    DataFileError
        If the file is missing, damaged, of another kind or format, or made for another model.
    """
    place = Path(path)
    blocks = (place / BLOCK_FILE).is_file() or kind_of(place) == KIND
    reader = load_blocks if blocks else load_retention
    return reader(path, spec, base_sha256=base_sha256)
