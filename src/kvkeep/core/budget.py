"""How much may be kept: a count of entries, however it was written down.

The primitive is the number of entries per KV head and layer. A ratio or a number of bytes is only
a way to write that number; :meth:`Budget.resolve` turns either into the count, once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

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
        prompt stays, on top of the budget.
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
        if self.keep_ratio is not None and not 0 < self.keep_ratio <= 1:
            raise BudgetError(
                f"keep ratio {self.keep_ratio} is outside (0, 1]: 0.25 keeps a quarter of the cache."
            )
        if self.entries is None and self.keep_ratio is None and self.kv_bytes is None:
            raise BudgetError("a budget needs an amount: entries=1024, keep_ratio=0.25 or bytes.")
        if self.keep_ratio is not None and self.kv_bytes is not None:
            raise BudgetError("give a keep ratio or a size in bytes, not both.")
        if self.entries is not None and (not isinstance(self.entries, int) or self.entries < 1):
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

        Raises
        ------
        BudgetError
            If what is needed is missing or the result is below one entry.
        """
        if self.resolved:
            return self
        if self.keep_ratio is not None:
            length = self.of if self.of is not None else context
            if length is None:
                return self
            count = int(self.keep_ratio * length)
        elif rows is None or bytes_per_entry is None or self.kv_bytes is None:
            return self
        else:
            count = self.kv_bytes // (rows * bytes_per_entry) - buffer
        if count < 1:
            raise BudgetError(
                f"the budget '{self}' comes to {count} entries per head, fewer than 1: give more."
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
