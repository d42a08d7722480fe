"""Do two ways to rank entries name the same ones? Overlap of their top sets, head by head. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from kvkeep.selection.top_k import top_k_mask


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Two top sets of ``count`` out of ``among`` entries.

    Parameters
    ----------
    one, other
        Names of the rankings.
    share
        Entries in both over ``count``, ``[layers, kv_heads]``.
    jaccard
        Entries in both over entries in either.
    chance
        The share that two rankings which know nothing of each other have on average: ``count / among``.
    """

    one: str
    other: str
    share: Tensor
    jaccard: Tensor
    chance: float


def overlaps(scores: Mapping[str, Tensor], count: int) -> list[Overlap]:
    """Compare every pair of rankings.

    Parameters
    ----------
    scores
        ``[layers, kv_heads, entries]`` by name, larger first; ties go to the earlier entry.
    count
        Entries in each top set.
    """
    tops = {name: top_set(each, count) for name, each in scores.items()}
    found = []
    for one, other in combinations(tops, 2):
        both = (tops[one] & tops[other]).sum(-1).double()
        found.append(
            Overlap(
                one=one,
                other=other,
                share=both / count,
                jaccard=both / (2 * count - both),
                chance=count / tops[one].shape[-1],
            )
        )
    return found


def top_set(scores: Tensor, count: int) -> Tensor:
    """bool, shape as given: the ``count`` largest of each head."""
    wanted = torch.full(scores.shape[:-1], count)
    return top_k_mask(scores, wanted, count, torch.ones_like(scores, dtype=torch.bool))
