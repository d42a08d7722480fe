"""Policies by name. Nothing is imported or registered before a name is asked for."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Mapping
from importlib.metadata import entry_points
from types import MappingProxyType

from kvkeep.core.errors import ConfigError
from kvkeep.core.policy import Policy

# Where our own policies live, and the entry-point group in which other packages announce theirs.
_HOME = "kvkeep.policies"
_GROUP = "kvkeep.policies"

_added: dict[str, type[Policy]] = {}
_found: dict[str, type[Policy]] = {}


def register_policy(policy: type[Policy]) -> type[Policy]:
    """Make a policy class known under its ``name``; usable as a decorator.

    Raises
    ------
    ConfigError
        If the class has no name, or the name is taken by another class.
    """
    if not policy.name:
        raise ConfigError(f'{policy.__name__} has no name: set `name: ClassVar[str] = "my-policy"`.')
    known = available_policies().get(policy.name)
    if known is not None and known is not policy:
        raise ConfigError(f"the name {policy.name!r} is taken by {known.__module__}.{known.__name__}.")
    _added[policy.name] = policy
    return policy


def available_policies() -> Mapping[str, type[Policy]]:
    """Every known policy class by name: ours, those of installed packages, those registered."""
    if not _found:
        home = importlib.import_module(_HOME)
        for info in pkgutil.iter_modules(home.__path__):
            module = importlib.import_module(f"{_HOME}.{info.name}")
            for value in vars(module).values():
                if _is_policy(value) and value.__module__ == module.__name__:
                    _found[value.name] = value
        for entry in entry_points(group=_GROUP):
            value = entry.load()
            if _is_policy(value):
                _found.setdefault(value.name, value)
    return MappingProxyType(dict(sorted((_found | _added).items())))


def _is_policy(value: object) -> bool:
    return (
        inspect.isclass(value)
        and issubclass(value, Policy)
        and not inspect.isabstract(value)
        and isinstance(value.name, str)
        and bool(value.name)
    )
