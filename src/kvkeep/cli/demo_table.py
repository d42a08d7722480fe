"""The end of `kvkeep demo`: how often the built-in reasoner is right under several policies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvkeep.testbed.trace_grade import Grade

NAME = "trace-1"
POLICIES = ("full", "streaming-llm", "snapkv", "random", "vase-attnv")
ROLES = ("hot", "warm", "dormant")
# A quarter of a chain of thought at the default size; the program stays on top of it.
ENTRIES, BUFFER = 96, 16
# Six seconds a policy on one core.
PROBLEMS = 32


@dataclass(frozen=True)
class Row:
    """One policy.

    Parameters
    ----------
    policy
        Its name.
    right, error
        Share of right answers, and its standard error over problems.
    by_role
        The share by the role of the register that was asked for.
    mean_cache
        Measured entries per KV head and layer, program included.
    """

    policy: str
    right: float
    error: float
    by_role: dict[str, float]
    mean_cache: float


def measure(
    model: Any,
    waiting: Callable[[str], AbstractContextManager[object]],
    *,
    count: int = PROBLEMS,
    seed: int = 0,
) -> list[Row]:
    """Let a reasoner run the same programs under each policy, greedily."""
    from itertools import islice

    from kvkeep.core.budget import Budget
    from kvkeep.policies.compose import policy
    from kvkeep.testbed.solve import solve
    from kvkeep.testbed.trace_task import problems, size

    programs = list(islice(problems(size("M"), "dev"), count))
    budget = {"budget": Budget(entries=ENTRIES, prompt="kept"), "buffer": BUFFER}
    rows = []
    for name in POLICIES:
        with waiting(f"running {count} programs under {name}"):
            chosen = policy(name) if name == "full" else policy(name, **budget)
            grades, mean_cache = solve(model, programs, chosen, seed=seed, batch=count)
        rows.append(row(name, grades, mean_cache))
    return rows


def row(name: str, grades: Sequence[Grade], mean_cache: float) -> Row:
    """Sum up the grades of a policy."""
    from statistics import mean, stdev

    from kvkeep.testbed.inspection import accuracy_by_role

    shares = [grade.accuracy for grade in grades]
    error = stdev(shares) / len(shares) ** 0.5 if len(shares) > 1 else 0.0
    by_role = accuracy_by_role(grades)
    by_role.pop("all")
    return Row(name, mean(shares), error, by_role, mean_cache)


def show(rows: Sequence[Row], count: int = PROBLEMS) -> None:
    """The table, and how to read it."""
    from kvkeep.cli import report
    from kvkeep.cli.tables import show_table

    report.heading(f"{NAME}, the built-in reasoner, runs {count} programs step by step")
    show_table(
        ("policy", "right answers", *ROLES, "mean cache"),
        [
            (
                each.policy,
                f"{100 * each.right:.0f} % ± {100 * each.error:.0f}",
                *(f"{100 * each.by_role[role]:.0f} %" if role in each.by_role else "–" for role in ROLES),
                f"{each.mean_cache:.0f}",
            )
            for each in rows
        ],
        texts={"policy": 12},
    )
    report.aside(
        f"All but full keep the program and {ENTRIES} entries of the chain of thought. Hot registers are "
        "read all the time, dormant ones once, long after they were written. ± is one standard error. "
        "More: kvkeep eval --help."
    )
