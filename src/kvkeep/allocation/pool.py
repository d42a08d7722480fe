"""What an allocation looks at: the heads of the layers that decide together, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.core.decision import KeepCounts
from kvkeep.core.view import LayerView
from kvkeep.scoring.calibrate import Calibration, calibrate

_LOWEST = float("-inf")


@dataclass(frozen=True)
class Pool:
    """Heads of one layer, or of several one after the other; on the device of the first layer.

    Parameters
    ----------
    shares
        int64 ``[batch, all heads]``: what the budget gives to every head alike; one number per row.
    least, most
        int64, same shape: protected entries of a head, which it keeps in any case, and entries it holds.
    scores
        float32 ``[batch, kv_heads, entries]`` per layer, ``-inf`` where an entry does not compete: it is
        protected, or the slot is empty.
    positions
        int64, same shapes: among equal scores the oldest is the first.
    """

    shares: Tensor
    least: Tensor
    most: Tensor
    scores: tuple[Tensor, ...]
    positions: tuple[Tensor, ...]

    @classmethod
    def of(
        cls,
        views: Sequence[LayerView],
        scores: Sequence[Tensor],
        counts: Sequence[KeepCounts],
        *,
        by: Calibration = "raw",
        mass: bool = False,
    ) -> Pool:
        """Collect what is needed of each view, visited once and in order.

        Parameters
        ----------
        by, mass
            How scores are made comparable: see :func:`~kvkeep.scoring.calibrate.calibrate`.
        """
        home = scores[0].device
        least, most, ranked, positions = [], [], [], []
        for view, score in zip(views, scores, strict=True):
            candidates = view.candidates
            scaled = calibrate(score, candidates, by, mass=mass)
            ranked.append(scaled.masked_fill(~candidates, _LOWEST).to(home))
            positions.append(view.positions.to(home))
            most.append(view.valid.sum(-1).to(home))
            least.append(most[-1] - candidates.sum(-1).to(home))
        return cls(
            shares=torch.cat([count.per_head.to(home) for count in counts], dim=1),
            least=torch.cat(least, dim=1),
            most=torch.cat(most, dim=1),
            scores=tuple(ranked),
            positions=tuple(positions),
        )

    @property
    def heads(self) -> list[int]:
        """KV heads of each layer."""
        return [score.shape[1] for score in self.scores]

    @property
    def total(self) -> Tensor:
        """int64 ``[batch]``: entries to share out, as far as they exist; protected ones in any case."""
        wanted = torch.minimum(self.shares.sum(-1), self.most.sum(-1))
        return torch.maximum(wanted, self.least.sum(-1))

    def split(self, per_head: Tensor, devices: Sequence[torch.device]) -> list[KeepCounts]:
        """Cut counts ``[batch, all heads]`` into those of each layer (reads the device once)."""
        parts = per_head.split(self.heads, dim=1)
        largest = torch.stack([part.amax() for part in parts]).tolist()
        return [
            KeepCounts(part.to(device), int(most))
            for part, device, most in zip(parts, devices, largest, strict=True)
        ]
