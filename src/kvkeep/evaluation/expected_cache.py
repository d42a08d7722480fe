"""Mean cache in closed form: what a budget will cost, before anything is run.

Entries grow by one per step from the prompt to the first eviction (the ramp), then run through
``C + 1 … C + B`` again and again (the saw-tooth), whose mean is ``C + (B + 1) / 2``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from kvkeep.core.budget import Budget
from kvkeep.core.errors import ConfigError
from kvkeep.core.policy import Policy


@dataclass(frozen=True, kw_only=True)
class ExpectedCache:
    """Entries per KV head and layer, prompt included, while the steps attend.

    Parameters
    ----------
    steps
        Decode steps.
    mean_cache, peak_cache
        Mean and maximum over the steps; with no step, what the prompt left.
    prefill_cache
        When the prompt had been read (and evicted, if the policy evicts it at once).
    evictions
        Rounds of eviction after a decode step.
    """

    steps: int
    mean_cache: float
    peak_cache: int
    prefill_cache: float
    evictions: int


def expected_cache(policy: Policy, *, prompt: int, steps: int) -> ExpectedCache:
    """Cache of one sequence.

    Parameters
    ----------
    policy
        Its budget, buffer and triggers are all that matters.
    prompt, steps
        Tokens of the prompt, and decode steps after it: one fewer than new tokens, because the first
        one is chosen when the prompt is read.

    Raises
    ------
    ConfigError
        If a length is out of range.
    """
    if prompt < 1 or steps < 0:
        raise ConfigError(f"prompt {prompt} and steps {steps} must be at least 1 and 0.")
    limit = policy.amount.count + (prompt if policy.amount.prompt == "kept" else 0)
    at_once = policy.bounded and policy.traits.trigger.prefill != "defer"
    start, buffer = min(prompt, limit) if at_once else prompt, policy.buffer
    ramp = _steps_to_first_eviction(policy, prompt, start, limit)
    if ramp is None or steps < ramp:
        total, peak, evictions = _sum_after(start, steps), start + steps, 0
    else:
        teeth, rest = divmod(steps - ramp, buffer)
        total = _sum_after(start, ramp) + teeth * _sum_after(limit, buffer) + _sum_after(limit, rest)
        peak, evictions = max(start + ramp, limit + (buffer if teeth else rest)), 1 + teeth
    return ExpectedCache(
        steps=steps,
        mean_cache=total / steps if steps else float(start),
        peak_cache=peak,
        prefill_cache=float(start),
        evictions=evictions,
    )


def _sum_after(entries: int, steps: int) -> int:
    """Sum of ``entries + 1 … entries + steps``."""
    return entries * steps + steps * (steps + 1) // 2


def _steps_to_first_eviction(policy: Policy, prompt: int, start: int, limit: int) -> int | None:
    """The decode step after which the first eviction falls due; ``None`` is never."""
    rule, buffer = policy.traits.trigger.decode, policy.buffer
    if not policy.bounded or rule == "never":
        return None
    if rule == "periodic":
        return limit + buffer * (max(0, start - limit) // buffer + 1) - start
    if rule in ("slack", "surprise"):  # when surprises come is not known: a buffer apart is a guess
        return max(1, limit + buffer - start)
    above = max(1, limit + 1 - start)
    return above + -(prompt + above) % buffer


def expected_mean(policy: Policy, lengths: Iterable[tuple[int, int]]) -> float:
    """Mean cache of a run, every step counting once.

    Parameters
    ----------
    lengths
        Prompt tokens and decode steps of each sample.
    """
    caches = [expected_cache(policy, prompt=prompt, steps=steps) for prompt, steps in lengths]
    steps = sum(cache.steps for cache in caches)
    return sum(cache.mean_cache * cache.steps for cache in caches) / steps if steps else 0.0


def budget_for(
    policy: Policy, lengths: Iterable[tuple[int, int]], mean_cache: float, *, low: int, high: int
) -> int:
    """The smallest whole budget whose expected mean cache reaches ``mean_cache``, or ``high``.

    It is where matching begins: a policy that changes the lengths of the answers ends elsewhere.

    Parameters
    ----------
    low, high
        Budgets to look at, both included; the policy must accept every one of them.
    """
    chosen = list(lengths)

    def mean(entries: int) -> float:
        amount = Budget(entries=entries, prompt=policy.amount.prompt)
        return expected_mean(policy.with_budget(amount), chosen)

    # Rounding: a mean that is reached exactly must not be missed by the last bit.
    return min(high, low + bisect_left(range(low, high + 1), mean_cache * (1 - 1e-12), key=mean))
