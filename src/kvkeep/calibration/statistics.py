"""Statistics of un-rotated queries: what is kept of them, how it is summed, which model it fits."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.core.files import tensor_digest
from kvkeep.core.spec import ModelSpec
from kvkeep.core.view import Rope
from kvkeep.scoring.trigonometric import pair_channels

# Frequencies that differ by less turn a key by less than a full circle in half a million tokens.
_FREQUENCY_TOLERANCE = 1e-5


@dataclass(frozen=True, kw_only=True)
class LayerStatistics:
    """Queries of one layer as complex numbers, one per channel pair, averaged over tokens.

    Pairs are those of :func:`kvkeep.scoring.trigonometric.pair_channels`.

    Parameters
    ----------
    mean
        complex64 ``[heads, head_dim / 2]``: mean query.
    magnitude
        float32 ``[heads, head_dim / 2]``: mean absolute value.
    """

    mean: Tensor
    magnitude: Tensor

    @property
    def concentration(self) -> Tensor:
        """float32 ``[heads, head_dim / 2]`` in [0, 1]: 1 if all queries point the same way.

        The mean resultant length, ``|mean| / magnitude``; 0 if the directions cancel out.
        """
        return self.mean.abs() / self.magnitude.clamp(min=torch.finfo(torch.float32).tiny)

    @property
    def head_concentration(self) -> Tensor:
        """float32 ``[heads]`` in [0, 1]: the same for whole heads, pairs weighted by their magnitude."""
        return self.mean.abs().sum(-1) / self.magnitude.sum(-1).clamp(min=torch.finfo(torch.float32).tiny)


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Where statistics come from.

    Parameters
    ----------
    model
        Name of the model, the last part of its path or hub id; empty if it has none.
    tokens
        Tokens that were averaged over.
    text_sha256
        SHA-256 of the text as UTF-8, or of the token ids as little-endian int64 if they were given.
    created
        UTC, ISO 8601.
    kvkeep_version
        Who measured.
    """

    model: str
    tokens: int
    text_sha256: str
    created: str
    kvkeep_version: str


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Calibration of one model: pass it to :class:`~kvkeep.RetentionCache` as ``calibration``.

    Parameters
    ----------
    layers
        Statistics of each full-attention layer, by layer index.
    model_type, heads, kv_heads, head_dim, rope_type
        Of the model, as its config states them.
    rope
        Rotary embedding of the model.
    provenance
        Where the statistics come from.
    """

    layers: Mapping[int, LayerStatistics]
    model_type: str
    heads: int
    kv_heads: int
    head_dim: int
    rope_type: str | None
    rope: Rope
    provenance: Provenance

    def check(self, spec: ModelSpec, rope: Rope) -> list[str]:
        """Differences between the model that was calibrated and another one; empty if they agree.

        Two models of one shape cannot be told apart: :attr:`provenance` names the one that was measured.
        """
        pairs = {
            "model type": (self.model_type, spec.model_type),
            "query heads": (self.heads, spec.heads),
            "KV heads": (self.kv_heads, spec.kv_heads),
            "head_dim": (self.head_dim, spec.head_dim),
            "full-attention layers": (_ranges(self.layers), _ranges(spec.managed)),
            "rope type": (self.rope_type, spec.rope_type),
            "rotating channels": (self.rope.rotary_dim, rope.rotary_dim),
        }
        differing = [
            f"{name} {theirs}, here {ours}" for name, (theirs, ours) in pairs.items() if theirs != ours
        ]
        if self.rope.rotary_dim == rope.rotary_dim:
            gap = float((self.rope.inv_freq.cpu() - rope.inv_freq.cpu()).abs().max())
            if not gap <= _FREQUENCY_TOLERANCE:
                differing.append(f"rotary frequencies that differ by up to {gap:.2g}")
        if not abs(self.rope.scaling - rope.scaling) <= _FREQUENCY_TOLERANCE:
            differing.append(f"rotary scaling {self.rope.scaling:g}, here {rope.scaling:g}")
        return [f"the calibration was made for a model with {difference}" for difference in differing]

    @property
    def sha256(self) -> str:
        """SHA-256 of the numbers, the same in memory and in the header of every file that holds them."""
        from kvkeep.calibration.files import tensors_of

        return tensor_digest(tensors_of(self))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file, whole or not at all; :func:`kvkeep.calibration.load` reads it.

        Raises
        ------
        DataFileError
            If the folder does not exist.
        """
        from kvkeep.calibration.files import save

        save(self, path)


class QuerySums:
    """Running sums of one layer's un-rotated queries, float64.

    Parameters
    ----------
    rope
        Which channels are pairs.
    """

    def __init__(self, rope: Rope) -> None:
        self.rope = rope
        self.count = 0
        self.total: Tensor | float = 0.0
        self.absolute: Tensor | float = 0.0

    def add(self, queries: Tensor) -> None:
        """Add un-rotated queries ``[batch, heads, tokens, head_dim]``."""
        pairs = torch.complex(*pair_channels(queries.float(), self.rope.rotary_dim))
        self.total = self.total + pairs.sum((0, 2), dtype=torch.complex128)
        self.absolute = self.absolute + pairs.abs().sum((0, 2), dtype=torch.float64)
        self.count += queries.shape[0] * queries.shape[2]

    def finish(self) -> LayerStatistics:
        """Means over everything added, on the CPU."""
        mean, magnitude = torch.as_tensor(self.total), torch.as_tensor(self.absolute)
        return LayerStatistics(
            mean=(mean / self.count).to("cpu", torch.complex64),
            magnitude=(magnitude / self.count).to("cpu", torch.float32),
        )


def _ranges(indices: object) -> str:
    """Write layer indices briefly: ``0-27`` or ``5, 11, 17``."""
    numbers = sorted(int(index) for index in indices)  # type: ignore[attr-defined]
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    return ", ".join(map(str, numbers)) or "none"
