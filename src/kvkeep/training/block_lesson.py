"""What block gates are taught in one forward of a frozen model: in each layer, where its queries look.

The gates change nothing that the model computes, so one plain forward gives both sides: attention, which is
the target, and queries and keys, which the gates see. The attention function is chosen by name, as everywhere
in kvkeep, and set back at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from kvkeep.core.errors import UnsupportedError
from kvkeep.core.view import Rope
from kvkeep.engine.attending import attending, explicit_mask
from kvkeep.gates.block_gates import BlockGates, pool_blocks
from kvkeep.kernels.rotation import unrotate
from kvkeep.training.block_recipe import BlockRecipe
from kvkeep.training.block_target import block_mass, block_target, covered, divergence

_NAME = "kvkeep_pooling"
# Elements of attention probabilities that exist at once.
_ELEMENTS = 1 << 26
_UNKNOWN = ("s_aux", "softcap")


@dataclass
class Lesson:
    """What the layers of one forward share.

    Parameters
    ----------
    gates, recipe, rope
        What learns, how, and the model's rotary embedding.
    lens
        int64 ``[batch]``: tokens of each document.
    read
        Blocks read for which to measure what the gates cover; ``None`` to learn.
    """

    gates: BlockGates
    recipe: BlockRecipe
    rope: Rope
    lens: Tensor
    read: int | None = None
    losses: dict[int, Tensor] = field(default_factory=dict)
    shares: dict[int, Tensor] = field(default_factory=dict)

    def attend(self, layer: int, query: Tensor, key: Tensor, scale: float) -> None:
        """Compare what the gates of a layer say with where its queries look.

        The last block of a document is pooled with the padding behind it. Only queries in that very block
        hear of it, and decoding never asks about a block that is not full.
        """
        block, tokens = self.recipe.block, query.shape[2]
        positions = torch.arange(tokens, device=query.device)
        plain_keys = unrotate(key.float(), positions[None], self.rope)
        blocks = self.gates.keys(layer, pool_blocks(plain_keys, block), positions[None, ::block], self.rope)
        first = int(((1 - self.recipe.share) * self.lens).min())
        part = max(1, _ELEMENTS // (query.shape[0] * query.shape[1] * tokens))
        total, shares = query.new_zeros(()), []
        for start in range(first, tokens, part):
            rows = slice(start, min(start + part, tokens))
            asked = positions[rows]
            attention = _attention(query[:, :, rows], key, asked, scale)
            plain = unrotate(query[:, :, rows].float(), asked[None], self.rope)
            mine = self.gates.queries(layer, plain, asked[None], self.rope)
            logits = self.gates.logits(mine, blocks)
            begun = positions[::block] <= asked[:, None]
            counted = (asked >= ((1 - self.recipe.share) * self.lens)[:, None]) & (asked < self.lens[:, None])
            target = block_target(attention, block, key.shape[1])
            total = total + divergence(target, logits, begun, counted) * counted.sum()
            if self.read is not None:
                mass = block_mass(attention, block, key.shape[1])
                ranks = {"gate": logits, "best": mass, "newest": positions[::block].expand_as(mass)}
                found = [
                    covered(mass, rank, asked // block, begun, self.read).mean(1)[counted]
                    for rank in ranks.values()
                ]
                shares.append(torch.stack(found))
        queries = self.lens.sum() - ((1 - self.recipe.share) * self.lens).ceil().sum()
        self.losses[layer] = total / queries.clamp(min=1)
        if shares:
            self.shares[layer] = torch.cat(shares, dim=1).mean(1)


_lesson: ContextVar[Lesson] = ContextVar("lesson")


def _attention(query: Tensor, key: Tensor, positions: Tensor, scale: float) -> Tensor:
    """float32 probabilities ``[batch, heads, queries, entries]``."""
    keys = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    logits = query.float() @ keys.float().transpose(-1, -2) * scale
    newer = torch.arange(key.shape[2], device=key.device) > positions[:, None]
    return logits.masked_fill(newer, -torch.inf).softmax(-1)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention function: plain attention, and a lesson on the way."""
    if any(options.get(name) is not None for name in _UNKNOWN):
        raise UnsupportedError(
            f"block gates cannot be trained on {type(module).__name__}",
            ["its attention has learned sinks or soft caps, which a gate of blocks does not know"],
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    lesson = _lesson.get()
    if module.layer_idx in lesson.gates.shape.layers:
        with torch.set_grad_enabled(lesson.read is None):
            lesson.attend(module.layer_idx, query.detach(), key.detach(), scale)
    grouped = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(query, key, value, attention_mask, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2).contiguous(), None


@contextmanager
def teaching(model: PreTrainedModel) -> Iterator[None]:
    """Let a model attend in lessons; at the end it attends as before.

    Raises
    ------
    UnsupportedError
        If it does not let one choose how it attends.
    """
    if not model._can_set_attn_implementation():
        raise UnsupportedError(
            f"block gates cannot be trained on {type(model).__name__}",
            ["it does not choose its attention function by name"],
        )
    with attending(model, _NAME, _attend, explicit_mask):
        yield


@contextmanager
def given(lesson: Lesson) -> Iterator[None]:
    """The lesson of the forwards inside."""
    token = _lesson.set(lesson)
    try:
        yield
    finally:
        _lesson.reset(token)
