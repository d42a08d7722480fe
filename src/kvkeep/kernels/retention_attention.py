"""Attention in which entries fade: what retention gates are trained with.

    logit[t, j] = scale * q_t . k_j + (t - j) * log_beta_j       for j <= t in the same document

so an entry that was written ``a`` tokens ago weighs ``beta ** a`` times what it would. Exact, in blocks of
queries: memory follows block times length, not its square, and the backward pass computes each block again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from kvkeep.kernels import retention_attention_flex

#: Queries of one block on a CPU: a block of weights stays in its cache.
BLOCK = 256


@dataclass(frozen=True)
class Packing:
    """Where documents stand in rows that hold several.

    Parameters
    ----------
    documents
        int64 ``[batch, tokens]``: which document each token belongs to; negative for padding.
    positions
        int64 ``[batch, tokens]``: 0-based within the document.
    """

    documents: Tensor
    positions: Tensor

    @property
    def real(self) -> Tensor:
        """bool ``[batch, tokens]``: not padding."""
        return self.documents >= 0

    def to(self, device: torch.device | str) -> Packing:
        """The same on a device."""
        return Packing(self.documents.to(device), self.positions.to(device))

    def visible(self, rows: slice, columns: slice, window: int | None = None) -> Tensor:
        """bool ``[batch, rows, columns]``: causal, same document, at most ``window`` entries back.

        Padding forms a document of its own, so that no row is empty.
        """
        same = self.documents[:, rows, None] == self.documents[:, None, columns]
        # Within one document order and distance are those of the columns, of padding too.
        place = torch.arange(self.documents.shape[1], device=self.documents.device)
        age = place[rows, None] - place[None, columns]
        seen = age >= 0 if window is None else (age >= 0) & (age < window)
        return same & seen


def retention_attention(
    query: Tensor, key: Tensor, value: Tensor, log_beta: Tensor, packing: Packing, scale: float
) -> Tensor:
    """Attend to fading entries.

    Parameters
    ----------
    query
        ``[batch, heads, tokens, head_dim]``.
    key, value
        ``[batch, kv_heads, tokens, head_dim]`` and ``[..., value_dim]``.
    log_beta
        float32 or float64 ``[batch, kv_heads, tokens]``, not positive; shared by the query heads of a group.
    packing
        Documents.
    scale
        Factor on the products.

    Returns
    -------
    Tensor
        ``[batch, heads, tokens, value_dim]`` in the type of ``value``. Gradients reach all four inputs.

    Source
    ------
    TrimKV (arXiv 2512.03324), the attention of training.
    """
    if retention_attention_flex.can_attend(query):
        return retention_attention_flex.attend(query, key, value, log_beta, packing.documents, scale)
    return retention_attention_blocks(query, key, value, log_beta, packing, scale)


def retention_attention_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_beta: Tensor,
    packing: Packing,
    scale: float,
    block: int = BLOCK,
) -> Tensor:
    """Compute :func:`retention_attention` with plain products, ``block`` queries at a time."""
    return _Blocks.apply(query, key, value, log_beta, packing, scale, block)  # type: ignore[no-any-return]


class _Blocks(Function):
    """Softmax attention by blocks of queries; weights are not stored but computed again."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_beta: Tensor,
        packing: Packing,
        scale: float,
        block: int,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, log_beta)
        ctx.packing, ctx.scale, ctx.block = packing, scale, block
        grouped = _grouped(query, key)
        out = torch.empty(*grouped.shape[:-1], value.shape[-1], dtype=value.dtype, device=value.device)
        for begin in range(0, query.shape[2], block):
            end = min(begin + block, query.shape[2])
            weights = _weights(grouped[..., begin:end, :], key, log_beta, packing, scale, begin, end)
            out[..., begin:end, :] = weights @ _full(value)[:, :, None, :end]
        return out.flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, log_beta = ctx.saved_tensors
        grouped = _grouped(query, key)
        outer = _grouped(gradients[0], key)
        d_query = torch.empty_like(grouped)
        d_key, d_value, d_beta = (torch.zeros_like(_full(each)) for each in (key, value, log_beta))
        keys, values = _full(key)[:, :, None], _full(value)[:, :, None]
        for begin in range(0, query.shape[2], ctx.block):
            end = min(begin + ctx.block, query.shape[2])
            weights = _weights(grouped[..., begin:end, :], key, log_beta, ctx.packing, ctx.scale, begin, end)
            given = _full(outer[..., begin:end, :])
            d_value[:, :, :end] += (weights.transpose(-1, -2) @ given).sum(2)
            d_weights = given @ values[..., :end, :].transpose(-1, -2)
            # Gradient of the softmax: w * (dw - sum of w * dw).
            d_logits = d_weights.mul_(weights)
            d_logits -= weights.mul_(d_logits.sum(-1, keepdim=True))
            d_query[..., begin:end, :] = d_logits @ keys[..., :end, :] * ctx.scale
            by_head = (d_logits.transpose(-1, -2) @ _full(grouped[..., begin:end, :])).sum(2)
            d_key[:, :, :end] += by_head * ctx.scale
            d_beta[:, :, :end] += (d_logits.sum(2) * _ages(begin, end, log_beta)).sum(-2)
        return (
            d_query.flatten(1, 2),
            d_key.to(key.dtype),
            d_value.to(value.dtype),
            d_beta.to(log_beta.dtype),
            None,
            None,
            None,
        )


def _full(tensor: Tensor) -> Tensor:
    """At least float32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _grouped(query: Tensor, key: Tensor) -> Tensor:
    """``[batch, heads, ...]`` to ``[batch, kv_heads, group, ...]``."""
    return query.unflatten(1, (key.shape[1], -1))


def _ages(begin: int, end: int, log_beta: Tensor) -> Tensor:
    """``[end - begin, end]``: tokens from each column to each row; negative above the diagonal."""
    place = torch.arange(end, device=log_beta.device)
    return (place[begin:, None] - place).to(log_beta.dtype)


def _weights(
    query: Tensor, key: Tensor, log_beta: Tensor, packing: Packing, scale: float, begin: int, end: int
) -> Tensor:
    """Attention weights ``[batch, kv_heads, group, end - begin, end]`` of some queries."""
    logits = _full(query) @ _full(key)[:, :, None, :end].transpose(-1, -2)
    logits *= scale
    logits += (_ages(begin, end, log_beta) * log_beta[:, :, None, :end])[:, :, None]
    hidden = ~packing.visible(slice(begin, end), slice(0, end))
    logits.masked_fill_(hidden[:, None, None], float("-inf"))
    return logits.softmax(-1)
