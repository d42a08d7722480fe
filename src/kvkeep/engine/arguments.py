"""What a user passes to a cache, checked before anything is built from it."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Sequence
from numbers import Integral
from typing import Any

from kvkeep.core.errors import ConfigError

# Ids enter the random source as int64.
_LOWEST_ID, _HIGHEST_ID = -(2**63), 2**63 - 1
_OF_A_MODEL = ("config", "dtype", "set_attn_implementation")


def require_model(model: Any) -> None:
    """Refuse what is no loaded model: a name, a class, a config, ``None``.

    A model may be wrapped (compiled, with adapters), so it is known by what it has.

    Raises
    ------
    ConfigError
        Saying how to load one.
    """
    if isinstance(model, type) or not all(hasattr(model, name) for name in _OF_A_MODEL):
        raise ConfigError(
            f"model {reprlib.repr(model)} is not a loaded model of transformers: pass what "
            "AutoModelForCausalLM.from_pretrained(name_or_folder) returns."
        )


def require_whole(name: str, value: Any, example: int, at_least: int | None = None) -> int:
    """The number as a plain ``int``.

    Raises
    ------
    ConfigError
        If it is not a whole number, or too small.
    """
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or (at_least is not None and value < at_least):
        wanted = "a whole number" + (f" of at least {at_least}" if at_least is not None else "")
        raise ConfigError(f"{name} {value!r} is not {wanted}: write for example {name}={example}.")
    return int(value)


def require_ids(ids: Any) -> list[int] | None:
    """The rows' names as plain numbers; ``None`` stays ``None``.

    Raises
    ------
    ConfigError
        If they are not whole numbers in a row.
    """
    if ids is None:
        return None
    found = ids.tolist() if hasattr(ids, "tolist") else ids  # a tensor or an array
    numbers = isinstance(found, Sequence) and not isinstance(found, str | bytes)
    if not numbers or not all(isinstance(each, Integral) and not isinstance(each, bool) for each in found):
        raise ConfigError(
            f"sequence_ids {reprlib.repr(ids)} are not whole numbers, one per row of the batch: write for "
            "example sequence_ids=[0, 1]."
        )
    for each in found:
        if not _LOWEST_ID <= each <= _HIGHEST_ID:
            raise ConfigError(f"sequence id {each} does not fit 64 bits: give each row a smaller number.")
    return [int(each) for each in found]


def require_calibration(calibration: Any) -> None:
    """Refuse what is no set of statistics, the path of one above all.

    Raises
    ------
    ConfigError
        Saying how to read the file.
    """
    if calibration is None or (hasattr(calibration, "layers") and hasattr(calibration, "check")):
        return
    path = isinstance(calibration, str | os.PathLike)
    what = f"{str(calibration)!r} is a path" if path else f"{reprlib.repr(calibration)} is something else"
    call = f"{str(calibration)!r}" if path else "path"
    raise ConfigError(
        f"calibration takes statistics, and {what}: pass calibration=kvkeep.calibration.load({call})."
    )


def require_gates(gates: Any) -> None:
    """Refuse what is no set of gates, the path of one above all.

    Raises
    ------
    ConfigError
        Saying how to read the file.
    """
    if gates is None or (callable(gates) and hasattr(gates, "check")):
        return
    path = isinstance(gates, str | os.PathLike)
    what = f"{str(gates)!r} is a path" if path else f"{reprlib.repr(gates)} is something else"
    call = f"{str(gates)!r}" if path else "path"
    raise ConfigError(f"gates takes modules, and {what}: pass gates=kvkeep.gates.load({call}).")
