"""Training of block gates: a frozen model reads, and in each layer the gates learn where it looks.

The gates change nothing that the model computes, so one plain forward gives both sides: attention, which is
the target, and queries and keys, which the gates see. The attention function is chosen by name, as everywhere
in kvkeep, and set back at the end.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvkeep.core.errors import KvkeepError, UnsupportedError
from kvkeep.core.view import Rope
from kvkeep.engine.attention import attention_name, set_attention
from kvkeep.engine.rotary import rope_of
from kvkeep.engine.spec import model_spec
from kvkeep.gates.block_gates import BlockGates, BlockShape, pool_blocks
from kvkeep.kernels.rotation import unrotate
from kvkeep.training.block_recipe import BlockRecipe
from kvkeep.training.block_target import block_mass, block_target, covered, divergence
from kvkeep.training.documents import Document, Rows, Source, stack
from kvkeep.training.frozen import frozen
from kvkeep.training.loop import Progress, Training

_NAME = "kvkeep_pooling"
# Elements of attention probabilities that exist at once.
_ELEMENTS = 1 << 26
_UNKNOWN = ("s_aux", "softcap")


@dataclass
class _Lesson:
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


_lesson: ContextVar[_Lesson] = ContextVar("lesson")


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


def _mask(**options: Any) -> Tensor | None:
    return sdpa_mask(**(options | {"allow_is_causal_skip": False}))  # always a mask, never a promise


class BlockTrainer(Training):
    """Gates, the model that they learn from, and what makes a step.

    Parameters
    ----------
    model
        Under :func:`block_training`.
    gates, recipe
        What learns, and how.
    source
        The document of any number.
    rope
        Of the model.
    data, base
        Name of the documents and hash of the model's weights: a checkpoint of others is refused.
    """

    kind = "block gates"

    def __init__(
        self,
        model: PreTrainedModel,
        gates: BlockGates,
        recipe: BlockRecipe,
        source: Source,
        rope: Rope,
        *,
        data: str,
        base: str,
    ) -> None:
        self.model, self._gates, self.recipe, self.source, self.rope = model, gates, recipe, source, rope
        self.data, self.base = data, base
        self.optimizer = torch.optim.AdamW(gates.parameters(), lr=recipe.rate, weight_decay=0.0)
        self.step = self.tokens = 0
        self.seconds = 0.0

    @property
    def gates(self) -> BlockGates:
        """What learns."""
        return self._gates

    @property
    def steps(self) -> int:
        """Steps in all."""
        return self.recipe.steps

    @property
    def facts(self) -> dict[str, Any]:
        """What a checkpoint must agree in."""
        return {"recipe": self.recipe.facts(), "data": self.data, "base": self.base, "processes": 1}

    def _documents(self, source: Source, number: int) -> Sequence[Document]:
        count = self.recipe.rows
        found = [source(number * count + place) for place in range(count)]
        return [Document(each.ids[: self.recipe.row]) for each in found]

    def _read(self, documents: Sequence[Document], read: int | None) -> _Lesson:
        longest = max(len(each.ids) for each in documents)
        rows: Rows = stack([[each] for each in documents], longest).to(self.model.device)
        lens = torch.tensor([len(each.ids) for each in documents], device=self.model.device)
        lesson = _Lesson(self.gates, self.recipe, self.rope, lens, read)
        token = _lesson.set(lesson)
        try:
            with torch.no_grad():
                self.model.get_decoder()(input_ids=rows.ids, use_cache=False)
        finally:
            _lesson.reset(token)
        return lesson

    def train_step(self) -> Progress:
        """Take one optimizer step."""
        begin, rate = time.perf_counter(), self.recipe.rate_at(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        documents = self._documents(self.source, self.step)
        lesson = self._read(documents, None)
        loss = torch.stack(list(lesson.losses.values())).sum() * self.recipe.weight
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        value = float(loss.detach())
        if not value < float("inf"):
            raise KvkeepError(f"training failed at step {self.step + 1}: loss {value}. Take a lower rate.")
        self.step += 1
        self.tokens += sum(len(each.ids) for each in documents)
        self.seconds += time.perf_counter() - begin
        return Progress(self.step, self.recipe.steps, {"loss": value}, rate, self.tokens, self.seconds)

    def measure(self, held_out: Source, batches: int, *, token_budget: int) -> dict[str, Any]:
        """Loss, and the share of attention in the blocks read, on documents that were not trained on.

        Returns
        -------
        dict
            ``loss`` as in training; ``covered`` by the gates, by the ``best`` choice of as many blocks, and
            by the ``newest`` blocks, mean over layers; and the gates' share by layer.
        """
        blocks = max(1, token_budget // self.recipe.block)
        lessons = [self._read(self._documents(held_out, number), blocks) for number in range(batches)]
        loss = sum(float(each) for lesson in lessons for each in lesson.losses.values()) / batches
        layers = self.gates.shape.layers
        shares = torch.stack(
            [torch.stack([lesson.shares[layer] for layer in layers]) for lesson in lessons]
        ).mean(0)
        gate, best, newest = shares.mean(0).tolist()
        return {
            "token_budget": token_budget,
            "loss": loss * self.recipe.weight,
            "covered": {"gates": gate, "best": best, "newest": newest},
            "covered_by_layer": dict(zip(map(str, layers), shares[:, 0].tolist(), strict=True)),
        }


@contextmanager
def block_training(
    model: PreTrainedModel, source: Source, recipe: BlockRecipe, *, data: str = "", base: str = ""
) -> Iterator[BlockTrainer]:
    """Prepare a run; at the end the model is as it was.

    Parameters
    ----------
    model
        A causal language model of transformers.
    source
        The document of any number.
    recipe
        Settings.
    data, base
        What the checkpoint says of documents and model: a name, and the hash of the weights.

    Raises
    ------
    UnsupportedError
        With every reason, if block gates cannot be trained on the model.
    """
    spec = model_spec(model.config)
    rope = rope_of(model, spec)
    if not model._can_set_attn_implementation():
        raise UnsupportedError(
            f"block gates cannot be trained on {type(model).__name__}",
            ["it does not choose its attention function by name"],
        )
    if _NAME not in ALL_ATTENTION_FUNCTIONS:
        ALL_MASK_ATTENTION_FUNCTIONS.register(_NAME, _mask)
        ALL_ATTENTION_FUNCTIONS.register(_NAME, _attend)
    with torch.random.fork_rng(devices=()):  # the caller's random state is none of our business
        torch.manual_seed(recipe.seed)
        shape = BlockShape.of(spec, block=recipe.block, width=recipe.width, normed=recipe.normed)
        gates = BlockGates(shape).to(model.device)
    if rope.rotary_dim > shape.width:
        raise UnsupportedError(
            "block gates of this width",
            [
                f"{rope.rotary_dim} channels of the model turn with the position, and the gates have "
                f"{shape.width}: give a width of at least {rope.rotary_dim}"
            ],
        )
    with frozen(model):
        before = attention_name(model)
        set_attention(model, _NAME)
        try:
            yield BlockTrainer(model, gates, recipe, source, rope, data=data, base=base)
        finally:
            set_attention(model, before)
