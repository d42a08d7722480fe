"""The errors of kvkeep, one tree.

    KvkeepError
    ├── ConfigError (ValueError)          a setting that cannot be right
    │   ├── BudgetError                   a budget that cannot hold what must be kept
    │   └── UnknownNameError              a name that no registry knows; suggests the nearest
    ├── UnsupportedError                  policy, model and engine do not fit; carries every reason
    ├── ScoreError                        a policy produced NaN, or scores of the wrong shape
    │   └── NotANumberError               NaN for an entry that competes
    ├── CacheError (RuntimeError)         a cache was used in a way its state does not allow
    │   └── CacheIntegrityError           internal bookkeeping does not add up
    ├── EvidenceError                     runs that prove nothing about each other; carries every reason
    ├── DataFileError                     a file that is missing, damaged, or made for something else
    └── MissingExtraError (ImportError)   an optional dependency; carries the pip line

Every message says what was given, what is allowed, and what to do next.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class KvkeepError(Exception):
    """Base of everything that kvkeep raises on purpose."""


class ConfigError(KvkeepError, ValueError):
    """A setting is wrong in itself."""


class BudgetError(ConfigError):
    """The budget cannot hold what must be kept."""


class UnknownNameError(ConfigError):
    """A name that the registry does not hold.

    Parameters
    ----------
    kind
        What was looked up, for example ``"policy"``.
    name
        The name that was given.
    known
        Every name that would have been accepted.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        self.kind, self.name, self.known = kind, name, sorted(known)
        spelt = {known.lower(): known for known in self.known}  # papers write H2O, we write h2o
        close = difflib.get_close_matches(name.lower(), spelt, n=1, cutoff=0.5)
        hint = f"; did you mean {spelt[close[0]]!r}?" if close else "."
        super().__init__(f"unknown {kind} {name!r}{hint} Known: {', '.join(self.known)}.")


class _ReasonsError(KvkeepError):
    """A refusal that lists everything it objects to.

    Parameters
    ----------
    what
        One clause: what was attempted.
    reasons
        Every reason found, so that one run shows all of them.
    """

    def __init__(self, what: str, reasons: Sequence[str]) -> None:
        self.reasons = tuple(reasons)
        lines = "".join(f"\n  - {reason}" for reason in self.reasons)
        super().__init__(f"{what}:{lines}")


class UnsupportedError(_ReasonsError):
    """Policy, model or engine cannot work together."""


class EvidenceError(_ReasonsError):
    """Measurements that may not be compared, or a claim that may not rest on them."""


class ScoreError(KvkeepError):
    """A policy returned scores that cannot be ranked."""


class NotANumberError(ScoreError):
    """A policy returned NaN for an entry that competes."""


class CacheError(KvkeepError, RuntimeError):
    """The cache was used in a way that its state does not allow."""


class CacheIntegrityError(CacheError):
    """The bookkeeping of a cache does not add up: a defect in kvkeep or in a policy."""


class DataFileError(KvkeepError):
    """A file is missing, damaged, or belongs to another model."""


class MissingExtraError(KvkeepError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package {package!r}, which is not installed. "
            f'Install it with: pip install "kvkeep[{extra}]"'
        )
