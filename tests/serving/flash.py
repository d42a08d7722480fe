"""The two CUDA kernels that FlashAttention calls, in plain torch, and strict about what they get."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def reshape_and_cache_flash(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    """Write ``[tokens, kv_heads, dim]`` into ``[blocks, slots, kv_heads, dim]``; slots below 0: padding."""
    assert slot_mapping.dtype == torch.int64
    assert kv_cache_dtype in ("auto", "bfloat16")
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            block, place = divmod(slot, key_cache.shape[1])
            key_cache[block, place], value_cache[block, place] = key[token], value[token]


def flash_attn_varlen_func(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    seqused_k: Tensor,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_size: list[int],
    block_table: Tensor,
    scheduler_metadata: Tensor | None,
    num_splits: int,
    **others: Any,
) -> None:
    """Attention of rows of new tokens, at the end of what their blocks hold."""
    assert causal is True
    assert scheduler_metadata is None  # made for the lengths of a whole step
    assert num_splits == 0  # a number only inside graphs
    for tensor in (cu_seqlens_q, seqused_k, block_table):
        assert tensor.dtype == torch.int32
        assert tensor.is_contiguous()
    bounds, lens = cu_seqlens_q.tolist(), seqused_k.tolist()
    assert bounds[0] == 0
    assert bounds[-1] == len(q) == len(out)
    assert len(lens) == len(block_table) == len(bounds) - 1
    group, size = q.shape[1] // k.shape[2], k.shape[1]
    for row, length in enumerate(lens):
        begin, end = bounds[row : row + 2]
        assert end - begin <= max_seqlen_q
        assert length <= max_seqlen_k
        assert -(-length // size) <= block_table.shape[1]
        if begin == end:
            continue
        blocks = block_table[row, : -(-length // size)].long()
        keys, values = (
            cache[blocks].flatten(0, 1)[:length].repeat_interleave(group, 1).float() for cache in (k, v)
        )
        logits = torch.einsum("qhd,khd->hqk", q[begin:end].float(), keys) * softmax_scale
        here = torch.arange(length - (end - begin), length)[:, None]
        there = torch.arange(length)
        seen = there <= here
        if window_size[0] >= 0:
            seen &= there >= here - window_size[0]
        chances = logits.masked_fill(~seen, float("-inf")).softmax(-1)
        out[begin:end] = torch.einsum("hqk,khd->qhd", chances, values).to(out.dtype)
