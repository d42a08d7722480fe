"""What log betas of a text say: half-lives, live entries, and which tokens are meant to stay. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Below it float32 has no number: a beta that rounds to 1 is given the longest half-life that there is.
_LEAST = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, kw_only=True)
class HalfLife:
    """Half-lives of many tokens in a few numbers, all in tokens.

    Half-lives spread over many powers of ten: the arithmetic mean is the few longest ones, that of the mean
    log beta (their harmonic mean) the few shortest. Between them lie the median and the geometric mean.

    Parameters
    ----------
    median, mean
        ``mean`` is the geometric one, ``exp(mean(ln h))``.
    arithmetic
        ``mean(h)``.
    of_mean
        ``ln 2 / -mean(ln beta)``.
    """

    median: float
    mean: float
    arithmetic: float
    of_mean: float


@dataclass(frozen=True, kw_only=True)
class Token:
    """How long one token of the text is meant to stay.

    Parameters
    ----------
    position
        Place in the text, from 0.
    half_life
        Geometric mean over layers and heads, in tokens.
    left
        Retention left at the end of the text, mean over layers and heads: 1 is all of it.
    """

    position: int
    half_life: float
    left: float


def half_lives(log_beta: Tensor) -> Tensor:
    """``ln 2 / -ln beta`` in tokens: float64, shape as given; finite, however close beta is to 1."""
    return math.log(2) / (-log_beta.double()).clamp(min=_LEAST)


def summarise(log_beta: Tensor) -> HalfLife:
    """Half-lives over all tokens of a tensor of any shape.

    Raises
    ------
    ValueError
        If there is none.
    """
    if not log_beta.numel():
        raise ValueError("no token has no half-life: give at least one log beta.")
    lives = half_lives(log_beta).flatten()
    return HalfLife(
        median=float(lives.quantile(0.5) if lives.numel() < 1 << 20 else lives.median()),
        mean=float(lives.log().mean().exp()),
        arithmetic=float(lives.mean()),
        of_mean=float(half_lives(log_beta.double().mean())),
    )


def capacity(log_beta: Tensor, times: Sequence[int]) -> Tensor:
    """Expected number of live entries at some tokens.

    Parameters
    ----------
    log_beta
        ``[layers, kv_heads, tokens]``.
    times
        Tokens of the text, from 0; each sees itself and all before it.

    Returns
    -------
    Tensor
        float64 ``[layers, kv_heads, times]``: ``S_t``, the sum of ``beta_j ** (t - j)`` over ``j <= t``.

    Source
    ------
    The capacity loss of TrimKV (arXiv 2512.03324) and DBTrimKV (arXiv 2605.09649).
    """
    logs = log_beta.double()
    place = torch.arange(logs.shape[-1], dtype=torch.float64, device=logs.device)
    return torch.stack([(logs[..., : t + 1] * (t - place[: t + 1])).exp().sum(-1) for t in times], -1)


def spread(tokens: int, count: int) -> list[int]:
    """At most ``count`` tokens of a text, evenly apart, the last one among them."""
    return sorted({round((step + 1) * tokens / count) - 1 for step in range(count)} - {-1})


def rank_tokens(log_beta: Tensor) -> list[Token]:
    """All tokens of a text, the longest half-life first; ties go to the earlier one.

    Parameters
    ----------
    log_beta
        ``[layers, kv_heads, tokens]``.
    """
    tokens = log_beta.shape[-1]
    logs = log_beta.double().flatten(0, 1)
    lives = half_lives(logs).log().mean(0).exp().tolist()
    age = tokens - 1 - torch.arange(tokens, dtype=torch.float64, device=logs.device)
    left = (logs * age).exp().mean(0).tolist()
    ranked = sorted(range(tokens), key=lambda at: (-lives[at], at))
    return [Token(position=at, half_life=lives[at], left=left[at]) for at in ranked]
