"""What a training leaves on disk while it runs: a checkpoint, and a log of its steps that fits it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kvkeep.core.errors import ConfigError, DataFileError
from kvkeep.core.files import atomic_path
from kvkeep.gates.files import CHECKPOINT

LOG = "log.jsonl"
_FIRST_KIND = "retention gates"  # checkpoints did not name a kind when there was only this one
_PARTS = {"gates", "optimizer", "progress", "recipe", "data", "base"}


def write_checkpoint(folder: Path, state: Mapping[str, Any]) -> None:
    """Write a checkpoint; an interrupted write leaves the one before."""
    with atomic_path(folder / CHECKPOINT) as temporary:
        torch.save(dict(state), temporary)


def read_checkpoint(folder: Path, kind: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Read a checkpoint of this training.

    Parameters
    ----------
    kind
        Gates that are trained: ``"retention gates"`` or ``"block gates"``.
    facts
        What it must say of itself: ``recipe``, ``data``, ``base`` and ``processes``.

    Raises
    ------
    DataFileError
        If it cannot be read, or is something else.
    ConfigError
        If it belongs to another training, naming every difference.
    """
    path = folder / CHECKPOINT
    try:
        state = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # torch raises anything, from EOFError to RuntimeError
        reason = f"{type(error).__name__}: {str(error).split('. ')[0]}".rstrip(".: ")
        raise DataFileError(f"cannot read {path} ({reason}). {_anew(folder)}") from error
    if not isinstance(state, dict) or not state.keys() >= _PARTS:
        raise DataFileError(f"{path} is no checkpoint of a training of gates. {_anew(folder)}")
    if (theirs := state.get("kind", _FIRST_KIND)) != kind:
        raise ConfigError(f"{path} belongs to a training of {theirs}, not of {kind}: give another --out.")
    if differing := _differences(state, facts):
        raise ConfigError(
            f"{path} belongs to another training: {'; '.join(differing)}. Continue it with the settings that "
            "it has, or give another --out."
        )
    return state


def _differences(state: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    """What a checkpoint says otherwise, setting by setting."""
    pairs = [(name, state["recipe"].get(name), value) for name, value in facts["recipe"].items()]
    # The data that a step reads depend on the number of processes.
    pairs += [(name, state.get(name), facts[name]) for name in ("data", "processes")]
    found = [f"{name} {theirs} there, {mine} here" for name, theirs, mine in pairs if theirs != mine]
    return found if state["base"] == facts["base"] else ["the model has other weights", *found]


def _anew(folder: Path) -> str:
    return f"Delete {folder}, or give another --out, and train without --resume."


def cut_log(folder: Path, step: int) -> None:
    """Bring the log back to a step: those after it, and a line that was not finished, are written again."""
    path, kept = folder / LOG, {}
    if not path.exists():
        return
    for line in path.read_bytes().split(b"\n"):
        try:
            number = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            continue
        if number <= step:
            kept[number] = line
    with atomic_path(path) as temporary:
        temporary.write_bytes(b"".join(kept[number] + b"\n" for number in sorted(kept)))
