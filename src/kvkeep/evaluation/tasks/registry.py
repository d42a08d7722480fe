"""Tasks by name, with their settings in brackets: ``needle(length=4096, count=50)``."""

from __future__ import annotations

import ast
import inspect
import os
from importlib import import_module
from typing import Any

from kvkeep.core.errors import ConfigError, UnknownNameError
from kvkeep.evaluation.tasks.base import Task

# Imported when they are asked for.
_HOMES = {
    "aime24": "kvkeep.evaluation.tasks.aime:AIME24",
    "aime25": "kvkeep.evaluation.tasks.aime:AIME25",
    "aime26": "kvkeep.evaluation.tasks.aime:AIME26",
    "gpqa_diamond": "kvkeep.evaluation.tasks.gpqa_diamond:GPQADiamond",
    "gsm8k": "kvkeep.evaluation.tasks.gsm8k:GSM8K",
    "hmmt25": "kvkeep.evaluation.tasks.hmmt25:HMMT25",
    "livecodebench": "kvkeep.evaluation.tasks.livecodebench:LiveCodeBench",
    "math500": "kvkeep.evaluation.tasks.math500:MATH500",
    "needle": "kvkeep.evaluation.tasks.needle:Needle",
    "ruler": "kvkeep.evaluation.tasks.ruler:Ruler",
    "trace": "kvkeep.evaluation.tasks.trace:Trace",
}


def available_tasks() -> list[str]:
    """Every known name."""
    return sorted(_HOMES)


def task_class(name: str) -> type[Task]:
    """The class of a task.

    Raises
    ------
    UnknownNameError
        If there is none of that name.
    """
    if name not in _HOMES:
        raise UnknownNameError("task", name, _HOMES)
    module, _, attribute = _HOMES[name].partition(":")
    return getattr(import_module(module), attribute)  # type: ignore[no-any-return]


def make_task(text: str, *, data: str | os.PathLike[str] | None = None) -> Task:
    """Build a task from its name, with or without settings.

    Parameters
    ----------
    text
        For example ``"math500"`` or ``"ruler(kind='variables', length=8192)"``.
    data
        File or folder for tasks that read one.

    Raises
    ------
    UnknownNameError, ConfigError
        If the name or a setting is unknown.

    Examples
    --------
    >>> make_task("needle(length=512, count=3)").options()
    {'length': 512, 'count': 3, 'seed': 0, 'depth': None}
    """
    name, options = parse(text)
    kind = task_class(name)
    known = set(inspect.signature(kind).parameters)
    settings = known - {"data", "limits"}
    unknown = sorted(set(options) - settings)
    if unknown:
        allowed = ", ".join(sorted(settings)) or "none"
        raise ConfigError(f"task {name} has no setting {unknown[0]!r}; it has: {allowed}.")
    if data is not None:
        if "data" not in known:
            raise ConfigError(f"task {name} makes its problems itself and reads no data: drop --data.")
        options["data"] = data
    return kind(**options)


def parse(text: str) -> tuple[str, dict[str, Any]]:
    """Split ``name(key=value, …)``.

    Raises
    ------
    ConfigError
        If it is not of that form.
    """
    name, bracket, rest = text.strip().partition("(")
    if not bracket:
        return name, {}
    try:
        call = ast.parse(f"f({rest}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(k.arg is None for k in call.keywords):
            raise ValueError
        return name.strip(), {str(k.arg): _value(k.value) for k in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise ConfigError(
            f"cannot read the task {text!r}: write a name, or a name with settings such as "
            "needle(length=4096, count=50)."
        ) from error


def with_setting(text: str, name: str, value: Any) -> str:
    """The same task with one setting more, or another value of it.

    Examples
    --------
    >>> with_setting("needle(length=512)", "distractors", 4)
    'needle(length=512, distractors=4)'
    """
    task, options = parse(text)
    settings = ", ".join(f"{key}={each!r}" for key, each in (options | {name: value}).items())
    return f"{task}({settings})"


def _value(node: ast.expr) -> Any:
    return node.id if isinstance(node, ast.Name) else ast.literal_eval(node)
