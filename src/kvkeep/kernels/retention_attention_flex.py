"""The GPU version of attention with fading entries: FlexAttention, compiled, differentiable in log beta."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention


def can_attend(query: Tensor) -> bool:
    """Whether FlexAttention serves this device and type: its backward pass exists on CUDA only."""
    return query.is_cuda and query.dtype in (torch.float16, torch.bfloat16, torch.float32)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_beta: Tensor,
    documents: Tensor,
    scale: float,
    *,
    compiled: bool = True,
) -> Tensor:
    """See :func:`kvkeep.kernels.retention_attention.retention_attention`.

    Parameters
    ----------
    compiled
        ``False`` runs the reference that torch has for tests, which builds all weights.
    """
    batch, heads, tokens, _ = query.shape
    group = heads // key.shape[1]

    def fade(score: Tensor, row: Tensor, head: Tensor, here: Tensor, there: Tensor) -> Tensor:
        return score + (here - there) * log_beta[row, head // group, there]

    def visible(row: Tensor, head: Tensor, here: Tensor, there: Tensor) -> Tensor:
        return (here >= there) & (documents[row, here] == documents[row, there])

    mask = create_block_mask(visible, batch, None, tokens, tokens, device=query.device)
    run: Any = _compiled() if compiled else flex_attention
    return run(  # type: ignore[no-any-return]
        query, key, value, score_mod=fade, block_mask=mask, scale=scale, enable_gqa=group > 1
    )


@functools.cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False)
