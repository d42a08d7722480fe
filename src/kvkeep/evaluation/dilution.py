"""Attention dilution: how much of a query's attention falls on what it needs, before and after eviction.

For a query with logits ``z`` over the entries it sees, evidence ``U`` among them and distractors ``D`` (all
others), the mass on the evidence is ``mu = sum_U e^z / (sum_U e^z + sum_D e^z)``. Two facts follow:

- if ``max_U z - min_D z <= Delta``, then ``mu <= |U| / (|U| + |D| e^-Delta)``: with a bounded gap the mass
  falls to nothing as distractors grow. The bound takes the largest gap of any pair; with the gap between
  the log-means of the two sets in its place it is an equality, so ``gap`` says whether a head makes up for
  more distractors by telling them apart better.
- if an eviction keeps fractions ``rho_U`` and ``rho_D`` of the unnormalised mass of the two sets, the odds of
  the mass are multiplied by ``rho_U / rho_D``: eviction concentrates attention exactly where it keeps more
  of the evidence than of the rest.

All functions work on the last dimension, in float64; logits of entries that are not there are ``-inf``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Attention:
    """What one set of queries did, one number per head and query.

    Parameters
    ----------
    mass
        Share of the attention that falls on the evidence.
    rivals
        Share that falls on named distractors (values that were overwritten, other needles).
    delta
        ``max_U z - min_D z``; minus infinity where no evidence is left.
    gap
        Log-mean of ``e^z`` over the evidence minus that over the distractors.
    bound
        ``|U| / (|U| + |D| e^-delta)``.
    """

    mass: Tensor
    rivals: Tensor
    delta: Tensor
    gap: Tensor
    bound: Tensor


@dataclass(frozen=True)
class Retained:
    """What an eviction leaves of the full cache's unnormalised mass, one number per head and query.

    Parameters
    ----------
    useful, distracting
        ``rho_U`` and ``rho_D``.
    mass
        Mass on the evidence that the odds form predicts from them and the full cache's mass.
    """

    useful: Tensor
    distracting: Tensor
    mass: Tensor


def attention(logits: Tensor, evidence: Tensor, rivals: Tensor | None = None) -> Attention:
    """Measure the attention of some queries.

    Parameters
    ----------
    logits
        ``[..., entries]`` scaled; ``-inf`` where a query sees no entry.
    evidence, rivals
        bool, broadcast to the logits; entries that are not seen do not count.
    """
    logits = logits.double()
    seen = ~logits.isneginf()
    useful, others = evidence & seen, ~evidence & seen
    shares = logits.softmax(-1).nan_to_num(0.0)  # a query that sees nothing
    count, rest = useful.sum(-1).double(), others.sum(-1).double()
    delta = _where(useful, logits, -torch.inf).amax(-1) - _where(others, logits, torch.inf).amin(-1)
    sums = [_where(part, logits, -torch.inf).logsumexp(-1) for part in (useful, others)]
    gap = (sums[0] - count.log()) - (sums[1] - rest.log())
    return Attention(
        mass=(shares * useful).sum(-1),
        rivals=torch.zeros_like(delta) if rivals is None else (shares * (rivals & others)).sum(-1),
        delta=delta,
        gap=torch.where((count > 0) & (rest > 0), gap, torch.where(count > 0, torch.inf, -torch.inf)),
        bound=bound(count, rest, delta),
    )


def bound(useful: Tensor, distractors: Tensor, delta: Tensor) -> Tensor:
    """Most mass that ``useful`` entries can hold against others: ``|U| / (|U| + |D| e^-Delta)``.

    Examples
    --------
    >>> bound(torch.tensor(1), torch.tensor(99), torch.tensor(0.0)).item()
    0.01
    """
    against = torch.where(distractors > 0, distractors * (-delta.double()).exp(), 0.0)
    return torch.where(useful > 0, useful / (useful + against), 0.0)


def retained(logits: Tensor, evidence: Tensor, kept: Tensor) -> Retained:
    """What keeping some entries does to queries of the full cache, all else being equal.

    Parameters
    ----------
    logits, evidence
        As in :func:`attention`, of the full cache.
    kept
        bool, broadcast to the logits.

    Notes
    -----
    A set that has no mass loses none of it: its fraction is 1.
    """
    logits = logits.double()
    seen = ~logits.isneginf()
    fractions = []
    for part in (evidence & seen, ~evidence & seen):
        whole = _where(part, logits, -torch.inf).logsumexp(-1)
        left = _where(part & kept, logits, -torch.inf).logsumexp(-1)
        fractions.append(torch.where(whole.isneginf(), 1.0, (left - whole).exp().nan_to_num(0.0)))
    useful, distracting = fractions
    predicted = mass_after(attention(logits, evidence).mass, useful, distracting)
    return Retained(useful, distracting, predicted)


def mass_after(mass: Tensor, useful: Tensor, distracting: Tensor) -> Tensor:
    """The odds form: mass on the evidence once fractions of both sets are kept.

    Examples
    --------
    >>> mass_after(torch.tensor(0.2), torch.tensor(1.0), torch.tensor(0.25)).item()
    0.5
    """
    left = useful * mass
    return (left / (left + distracting * (1 - mass))).nan_to_num(0.0)


def _where(part: Tensor, logits: Tensor, other: float) -> Tensor:
    return torch.where(part, logits, other)
