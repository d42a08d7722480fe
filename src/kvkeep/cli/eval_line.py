"""The `kvkeep eval` that repeats one run of a study alone, flags of its mechanism included."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from kvkeep.cli.eval_setup import Setup
    from kvkeep.evaluation.design_space.mechanisms import Arm
    from kvkeep.evaluation.runner import Plan


# Holds every policy with its defaults.
_ROOMY = 1 << 16


def eval_line(setup: Setup, arm: Arm, plan: Plan, prereg: Path | None = None) -> str:
    """What to type, but for ``--out``.

    Parameters
    ----------
    prereg
        The frozen plan of a run on held-out problems.
    """
    amount = arm.policy.amount
    words: list[Any] = ["kvkeep", "eval", "--task", setup.task, "--model", setup.model_name]
    words += ["--policy", arm.policy.name, "--budget", amount.count, "--prompt-mode", amount.prompt]
    for name, value in changed_options(arm).items():
        words += ["--buffer", value] if name == "buffer" else ["--option", f"{name}={value}"]
    words += [word for flag in arm.flags for word in flag.split()]
    words += ["--split", plan.part] + ([] if prereg is None else ["--prereg", prereg.name])
    words += [] if plan.limit is None else ["--limit", plan.limit]
    words += ["--draws", plan.draws, "--seed", plan.seed, "--batch-size", plan.batch_size]
    words += [] if setup.threads is None else ["--threads", setup.threads]
    return shlex.join(str(word) for word in words)


def changed_options(arm: Arm) -> dict[str, Any]:
    """Settings of the policy that are not its defaults, budget apart."""
    from kvkeep.policies.compose import policy

    # A budget in which every default fits: that of the arm may be too small for them.
    default = base_options(policy(arm.policy.name, budget=_ROOMY))
    given = base_options(arm.policy)
    return {name: value for name, value in given.items() if name != "budget" and value != default.get(name)}


def base_options(policy: Any) -> dict[str, Any]:
    """Settings of a policy; of a composition, those of its base: its name says the parts."""
    while getattr(policy, "base", None) is not None:
        policy = policy.base
    return dict(policy.options())
