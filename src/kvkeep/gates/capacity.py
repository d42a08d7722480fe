"""How many entries gates keep alive, and the loss on what is too many.

    S[t] = sum over j <= t in the document of beta_j ** (t - j)

Every entry fades at its own rate, so there is no recursion from one token to the next: the sum is taken in
tiles, exactly, and its gradient computes the tiles again.

Source: TrimKV (arXiv 2512.03324; each head by itself) and DBTrimKV (arXiv 2605.09649; all layers and heads
together); normalizers of the official code.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function

from kvkeep.kernels.retention_attention import Packing

Scope = Literal["local", "global"]
_TILE = 128


def expected_entries(log_beta: Tensor, packing: Packing, tile: int = _TILE) -> Tensor:
    """Sum of retentions over a document so far: how many entries are alive, in expectation.

    Parameters
    ----------
    log_beta
        ``[batch, heads, tokens]``, not positive.
    packing
        Documents.
    tile
        Tokens of a tile.

    Returns
    -------
    Tensor
        Like ``log_beta``: ``S`` at each token, between 1 and its place in the document plus 1.
    """
    return _Sum.apply(log_beta, packing, tile)  # type: ignore[no-any-return]


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, log_beta: Tensor, packing: Packing, tile: int) -> Tensor:
        ctx.save_for_backward(log_beta)
        ctx.packing, ctx.tile = packing, tile
        out = torch.empty_like(log_beta)
        for begin in range(0, log_beta.shape[2], tile):
            rows = slice(begin, begin + tile)
            out[..., rows] = sum(
                _retention(log_beta, packing, rows, columns)[0].sum(-1) for columns in _before(rows, tile)
            )
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (log_beta,) = ctx.saved_tensors
        d_beta = torch.zeros_like(log_beta)
        for begin in range(0, log_beta.shape[2], ctx.tile):
            rows = slice(begin, begin + ctx.tile)
            given = gradients[0][..., rows, None]
            for columns in _before(rows, ctx.tile):
                retention, age = _retention(log_beta, ctx.packing, rows, columns)
                d_beta[..., columns] += retention.mul_(age).mul_(given).sum(-2)
        return d_beta, None, None


def _before(rows: slice, tile: int) -> list[slice]:
    """Tiles of columns that rows can see."""
    return [slice(begin, begin + tile) for begin in range(0, rows.stop, tile) if begin <= rows.start]


def _retention(log_beta: Tensor, packing: Packing, rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
    """``beta_j ** (t - j)`` of a tile, zero where hidden ``[batch, heads, rows, columns]``; and ``t - j``."""
    place = torch.arange(log_beta.shape[2], device=log_beta.device)
    age = (place[rows, None] - place[None, columns]).clamp(min=0).to(log_beta.dtype)
    visible = packing.visible(rows, columns)[:, None]
    return (age * log_beta[..., None, columns]).exp_().mul_(visible), age


def capacity_loss(entries: Tensor, packing: Packing, memory: float, scope: Scope) -> Tensor:
    """Mean excess over the memory, among the places where there is any.

    Parameters
    ----------
    entries
        ``[layers, batch, kv_heads, tokens]``: :func:`expected_entries` of each gated layer.
    packing
        Documents.
    memory
        Entries per KV head that are free; below 1 a share of the row's length.
    scope
        ``"local"``: each head by itself; ``"global"``: the sum over all layers and heads against
        ``layers * heads * memory``.

    Returns
    -------
    Tensor
        Scalar; 0 where nothing is too much.
    """
    layers, _, heads, tokens = entries.shape
    free = memory * tokens if memory < 1 else memory
    last = packing.positions.to(entries.dtype)  # 0-based place in the document
    real = packing.real
    if scope == "global":
        # Both sides of the published quotient divided by layers * heads.
        excess, least = entries.mean((0, 2)) - free, 1 / (layers * heads)
    else:
        excess, last, real, least = entries - free, last[None, :, None], real[None, :, None], 1.0
    share = excess.clamp(min=0) / (last - free).clamp(min=least) * real
    return share.sum() / (share > 0).sum().clamp(min=1)
