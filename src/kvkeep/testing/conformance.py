"""The suite: every check by name, for our policies and for yours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from unittest import SkipTest

from kvkeep.engine.fitting import StoreKind
from kvkeep.testing import contract, laws
from kvkeep.testing.subject import PolicyOrFactory, Subject


@dataclass(frozen=True)
class Check:
    """One promise of a policy; call it with a policy, its class, or a function that builds one.

    Parameters
    ----------
    name
        With hyphens, as it appears in test ids.
    run
        Raises ``AssertionError`` where the promise is broken, ``unittest.SkipTest`` (which pytest
        knows) where it does not apply.
    """

    name: str
    run: Callable[[Subject], None]

    def __call__(self, policy: PolicyOrFactory, *, store: StoreKind = "auto") -> None:
        self.run(Subject.of(policy, store=store))

    def __str__(self) -> str:
        return self.name


def checks() -> tuple[Check, ...]:
    """Every check, for ``@pytest.mark.parametrize("check", kvkeep.testing.checks(), ids=str)``.

    Examples
    --------
    >>> [str(check) for check in checks()][:3]
    ['documented', 'frozen', 'rebuilt-from-options']
    """
    functions = (*contract.CHECKS, *laws.CHECKS)
    return tuple(Check(function.__name__.replace("_", "-"), function) for function in functions)


def check_policy(policy: PolicyOrFactory, *, store: StoreKind = "auto") -> None:
    """Run every check on a policy and report all that fail.

    Parameters
    ----------
    policy
        A policy object as it is (choose a small budget: 24 with a buffer of 8 takes seconds), a policy
        class (built with these), or a function without arguments that returns a policy.
    store
        Where entries live during the runs, as for :class:`~kvkeep.RetentionCache`.

    Raises
    ------
    AssertionError
        With one line per broken promise.

    Examples
    --------
    >>> import kvkeep
    >>> check_policy(kvkeep.StreamingLLM(budget=24, buffer=8, sinks=2))
    """
    problems = []
    for check in checks():
        try:
            check(policy, store=store)
        except SkipTest:
            continue
        except Exception as error:
            problems.append(f"{check}: {error}")
    if problems:
        raise AssertionError("\n".join([f"{len(problems)} checks failed", *problems]))
