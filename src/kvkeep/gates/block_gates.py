"""Block gates: small trained modules that say which blocks of entries a query will attend to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvkeep.core.errors import ConfigError
from kvkeep.core.files import tensor_digest
from kvkeep.core.spec import ModelSpec
from kvkeep.core.view import Rope
from kvkeep.kernels.rotation import rotate

_EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """Sizes of the block gates of one model.

    Parameters
    ----------
    block
        Entries of a block (code: 64).
    width
        Channels in which a query and a block meet (code: 128).
    normed
        RMSNorm on both sides (on in the script of the code).
    model_type, heads, kv_heads, head_dim, layers
        Of the model; ``layers`` are the indices of the full-attention ones.

    Raises
    ------
    ConfigError
        If a size is below 1.
    """

    block: int = 64
    width: int
    normed: bool = True
    model_type: str
    heads: int
    kv_heads: int
    head_dim: int
    layers: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("block", "width"):
            if getattr(self, name) < 1:
                raise ConfigError(f"block gates of {name} {getattr(self, name)}: give at least 1.")

    @classmethod
    def of(cls, spec: ModelSpec, *, block: int = 64, width: int | None = None, normed: bool = True) -> Self:
        """The gates that fit a model; ``width=None`` is its head_dim, so that its rotation fits."""
        return cls(
            block=block,
            width=spec.head_dim if width is None else width,
            normed=normed,
            model_type=spec.model_type,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            layers=spec.managed,
        )

    def check(self, spec: ModelSpec) -> list[str]:
        """Reasons why the gates do not fit a model; empty if they do."""
        theirs = {
            "model_type": spec.model_type,
            "heads": spec.heads,
            "kv_heads": spec.kv_heads,
            "head_dim": spec.head_dim,
            "layers": spec.managed,
        }
        return [
            f"the gates were made for {name} {getattr(self, name)!r}, the model has {value!r}"
            for name, value in theirs.items()
            if getattr(self, name) != value
        ]


class LayerBlockGate(nn.Module):
    """Both sides of one layer: a matrix for each KV head.

    Parameters
    ----------
    shape
        Sizes.
    """

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        query_dim = shape.heads // shape.kv_heads * shape.head_dim
        self.query = nn.Parameter(torch.empty(shape.kv_heads, query_dim, shape.width))
        self.key = nn.Parameter(torch.empty(shape.kv_heads, 3 * shape.head_dim, shape.width))
        for weight in (self.query, self.key):
            for head in weight:
                nn.init.xavier_uniform_(head)
        self.query_norm = nn.Parameter(torch.ones(shape.width)) if shape.normed else None
        self.key_norm = nn.Parameter(torch.ones(shape.width)) if shape.normed else None


class BlockGates(nn.Module):
    """One gate for every full-attention layer of a model.

    A query meets a block as in attention: both are projected, normed and turned to their positions, and their
    product over sqrt(width) is the logit of the block.

    Parameters
    ----------
    shape
        Sizes.

    Source
    ------
    SeerAttention-R, arXiv 2506.08889; official code microsoft/SeerAttention.

    Examples
    --------
    >>> shape = BlockShape(width=8, model_type="llama", heads=4, kv_heads=2, head_dim=8, layers=(0, 1))
    >>> sum(weight.numel() for weight in BlockGates(shape).parameters())
    1312
    """

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.shape = shape
        #: Hash of the weights of the model that they were trained beside; ``None`` if nobody said.
        self.base: str | None = None
        self.layers = nn.ModuleDict({str(index): LayerBlockGate(shape) for index in shape.layers})

    def _layer(self, layer: int) -> LayerBlockGate:
        return self.layers[str(layer)]  # type: ignore[return-value]

    def queries(self, layer: int, queries: Tensor, positions: Tensor, rope: Rope) -> Tensor:
        """The query side.

        Parameters
        ----------
        queries
            ``[batch, heads, tokens, head_dim]``, not rotated.
        positions
            int64 ``[batch, tokens]``.

        Returns
        -------
        Tensor
            ``[batch, kv_heads, tokens, width]``.
        """
        gate, shape = self._layer(layer), self.shape
        grouped = queries.unflatten(1, (shape.kv_heads, -1)).transpose(2, 3).flatten(3)
        return rotate(_project(grouped, gate.query, gate.query_norm), positions, rope)

    def keys(self, layer: int, pooled: Tensor, positions: Tensor, rope: Rope) -> Tensor:
        """The key side.

        Parameters
        ----------
        pooled
            ``[batch, kv_heads, blocks, 3 * head_dim]`` from :func:`pool_blocks`.
        positions
            int64 ``[batch, blocks]``: the first of each block.

        Returns
        -------
        Tensor
            ``[batch, kv_heads, blocks, width]``.
        """
        gate = self._layer(layer)
        return rotate(_project(pooled, gate.key, gate.key_norm), positions, rope)

    def logits(self, queries: Tensor, keys: Tensor) -> Tensor:
        """``[batch, kv_heads, tokens, blocks]`` of both sides."""
        return queries @ keys.transpose(-1, -2) / math.sqrt(self.shape.width)

    def check(self, spec: ModelSpec) -> list[str]:
        """Reasons why the gates do not fit a model; empty if they do."""
        return self.shape.check(spec)

    @property
    def sha256(self) -> str:
        """Hash of all weights, whatever file they came from."""
        return tensor_digest({name: each.cpu().contiguous() for name, each in self.state_dict().items()})


def _project(vectors: Tensor, weight: Tensor, norm: Tensor | None) -> Tensor:
    """``[batch, kv_heads, count, dim]`` times the matrix of each KV head, in the gate's number type."""
    projected = torch.einsum("bkni,kiw->bknw", vectors.to(weight.dtype), weight)
    return projected if norm is None else F.rms_norm(projected, norm.shape, norm, _EPSILON)


def pool_blocks(keys: Tensor, block: int) -> Tensor:
    """Largest, smallest and mean of the keys of each block, side by side.

    Parameters
    ----------
    keys
        ``[batch, kv_heads, entries, head_dim]``, not rotated; the last block may be shorter.

    Returns
    -------
    Tensor
        ``[batch, kv_heads, blocks, 3 * head_dim]``.
    """
    whole = keys.shape[2] // block * block
    parts = [keys[:, :, :whole].unflatten(2, (-1, block))] if whole else []
    if whole < keys.shape[2]:
        parts.append(keys[:, :, None, whole:])
    pooled = [torch.cat([part.amax(3), part.amin(3), part.mean(3)], dim=-1) for part in parts]
    return torch.cat(pooled, dim=2)
