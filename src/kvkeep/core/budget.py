"""How much may be kept: a count of entries, however it was written down.

The primitive is the number of entries per KV head and layer. A ratio or a number of bytes is only
a way to write that number; :meth:`Budget.resolve` turns either into the count, once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, Literal

from kvkeep.core.errors import BudgetError

PromptMode = Literal["counts", "kept"]

_UNITS = {"b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def parse_bytes(text: str | int) -> int:
    """Read a size such as ``"2GiB"`` or ``"512 MB"``; a plain number is bytes.

    Raises
    ------
    BudgetError
        If the text is not a positive size.

    Examples
    --------
    >>> parse_bytes("2GiB"), parse_bytes("1.5 MB"), parse_bytes(4096)
    (2147483648, 1500000, 4096)
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", str(text))
    unit = (match.group(2) or "b").lower() if match else ""
    if match is None or unit not in _UNITS or float(match.group(1)) <= 0:
        raise BudgetError(
            f"cannot read {text!r} as a size in bytes. Write a positive number with an optional "
            "unit, for example 800MiB, 2GiB or 1.5GB."
        )
    return int(float(match.group(1)) * _UNITS[unit])


def format_bytes(count: float) -> str:
    """Write a number of bytes with a binary unit, for example ``"22.5 MiB"``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


def _is_number(value: object, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_number(value, int) and value >= 1


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Entries kept per KV head and layer after an eviction, protected ones included.

    Parameters
    ----------
    entries
        The count itself, at least 1. ``None`` while a ratio or a size still waits for
        :meth:`resolve`.
    prompt
        ``"counts"``: prompt entries compete for the budget like all others. ``"kept"``: the whole
        prompt stays, on top of the budget. The prompt is what is read before the first generated token: in
        a conversation on one cache the prompts of later turns compete like all other entries.
    keep_ratio, of
        Fraction in (0, 1] of a sequence of ``of`` tokens (the longest length expected, prompt and
        answer together).
    kv_bytes
        Bytes for keys and values of all layers, heads and sequences together.

    Raises
    ------
    BudgetError
        If no amount, or more than one, is given, or an amount is out of range.

    Examples
    --------
    >>> Budget(entries=1024).entries
    1024
    >>> Budget.from_keep_ratio(0.25, of=8192).entries
    2048
    """

    entries: int | None = None
    prompt: PromptMode = "counts"
    keep_ratio: float | None = None
    of: int | None = None
    kv_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.prompt not in ("counts", "kept"):
            raise BudgetError(f"prompt mode {self.prompt!r} is unknown: use 'counts' or 'kept'.")
        ratio = self.keep_ratio
        if ratio is not None and (not _is_number(ratio, int | float) or not 0 < ratio <= 1):
            raise BudgetError(f"keep ratio {ratio!r} is outside (0, 1]: 0.25 keeps a quarter of the cache.")
        if self.kv_bytes is not None and not _is_count(self.kv_bytes):
            raise BudgetError(
                f"kv_bytes {self.kv_bytes!r} is not a whole number of at least 1 byte: "
                "Budget.from_bytes('2GiB') reads sizes with units."
            )
        if self.of is not None and not _is_count(self.of):
            raise BudgetError(f"of={self.of!r} is not a whole number of at least 1 token.")
        if self.of is not None and ratio is None:
            raise BudgetError(f"of={self.of} is the length of a ratio: give keep_ratio=0.25 with it.")
        if self.entries is None and self.keep_ratio is None and self.kv_bytes is None:
            raise BudgetError("a budget needs an amount: entries=1024, keep_ratio=0.25 or bytes.")
        if self.keep_ratio is not None and self.kv_bytes is not None:
            raise BudgetError("give a keep ratio or a size in bytes, not both.")
        if self.entries is not None and not _is_count(self.entries):
            raise BudgetError(f"budget {self.entries!r} is not a whole number of at least 1 entry.")

    @classmethod
    def from_keep_ratio(
        cls, keep_ratio: float, *, of: int | None = None, prompt: PromptMode = "counts"
    ) -> Budget:
        """A fraction of a sequence of ``of`` tokens; without ``of`` it is resolved by the cache."""
        unresolved = cls(keep_ratio=keep_ratio, of=of, prompt=prompt)
        return unresolved if of is None else unresolved.resolve()

    @classmethod
    def from_bytes(cls, size: str | int, *, prompt: PromptMode = "counts") -> Budget:
        """Bytes of keys and values for the whole batch; the cache knows the model's shape."""
        return cls(kv_bytes=parse_bytes(size), prompt=prompt)

    @classmethod
    def of_entries(cls, amount: int | Budget) -> Budget:
        """Accept a plain count where a budget is expected."""
        if isinstance(amount, Budget):
            return amount
        if isinstance(amount, bool) or not isinstance(amount, int):
            raise BudgetError(f"budget {amount!r} is neither a whole number of entries nor a kvkeep.Budget.")
        return cls(entries=amount)

    @property
    def resolved(self) -> bool:
        """Whether the count is known."""
        return self.entries is not None

    @property
    def count(self) -> int:
        """The count of entries per KV head and layer.

        Raises
        ------
        BudgetError
            If a ratio or a size has not been resolved yet.
        """
        if self.entries is None:
            raise BudgetError(
                f"the budget '{self}' is not a count yet: a ratio needs the length it is a ratio "
                "of (Budget.from_keep_ratio(0.25, of=8192), or context=8192 on the cache), a size "
                "in bytes needs the number of sequences (rows=8 on the cache)."
            )
        return self.entries

    def resolve(
        self,
        *,
        context: int | None = None,
        rows: int | None = None,
        bytes_per_entry: int | None = None,
        buffer: int = 0,
        least: int = 1,
        spare: int = 0,
    ) -> Budget:
        """Turn a ratio or a size into the count it stands for.

        Parameters
        ----------
        context
            Tokens that a ratio refers to, when ``of`` was not given.
        rows
            Sequences that share a size in bytes.
        bytes_per_entry
            Bytes that one entry takes in all layers and KV heads of one sequence together.
        buffer
            Entries that may be stored above the budget between evictions: a size in bytes holds
            the budget and this buffer, so that the peak stays inside it.
        least
            Fewest entries that the policy can work with: a size must hold them.
        spare
            Room for so many entries more that the store lays out and may leave empty (pages).

        Raises
        ------
        BudgetError
            If a ratio comes to less than one entry, or a size to less than ``least``.
        """
        if self.resolved:
            return self
        if self.keep_ratio is not None:
            length = self.of if self.of is not None else context
            if length is None:
                return self
            count = int(self.keep_ratio * length)
            if count < 1:
                raise BudgetError(
                    f"the budget '{self}' comes to 0 entries per head of {length} tokens: give a ratio of at "
                    f"least {1 / length:.2g}."
                )
        elif rows is None or bytes_per_entry is None or self.kv_bytes is None:
            return self
        else:
            entry = rows * bytes_per_entry
            count = self.kv_bytes // entry - buffer - spare
            if count < least:
                needed, sequences = (least + buffer + spare) * entry, "sequence" if rows == 1 else "sequences"
                raise BudgetError(
                    f"the budget '{self}' is too small: one entry takes {entry} bytes in all layers and "
                    f"heads of {rows} {sequences}, and a budget of {least} with a "
                    f"buffer of {buffer} is the least that works: give at least {needed} bytes "
                    f"({format_bytes(needed)}), or lower the buffer."
                )
        return replace(self, entries=count)

    def __str__(self) -> str:
        parts = []
        if self.entries is not None:
            parts.append(f"{self.entries} entries")
        if self.keep_ratio is not None:
            parts.append(f"ratio {self.keep_ratio:g}" + (f" of {self.of} tokens" if self.of else ""))
        if self.kv_bytes is not None:
            parts.append(format_bytes(self.kv_bytes))
        return " = ".join(parts) + (" + prompt" if self.prompt == "kept" else "")
