"""Training of block gates: a frozen model reads, and in each layer the gates learn where it looks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from kvkeep.core.errors import KvkeepError, UnsupportedError
from kvkeep.core.view import Rope
from kvkeep.engine.rotary import rope_of
from kvkeep.engine.spec import model_spec
from kvkeep.gates.block_gates import BlockGates, BlockShape
from kvkeep.training.block_lesson import Lesson, given, teaching
from kvkeep.training.block_recipe import BlockRecipe
from kvkeep.training.documents import Document, Rows, Source, stack
from kvkeep.training.frozen import frozen
from kvkeep.training.loop import Progress, Training


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

    def _read(self, documents: Sequence[Document], read: int | None) -> Lesson:
        longest = max(len(each.ids) for each in documents)
        rows: Rows = stack([[each] for each in documents], longest).to(self.model.device)
        lens = torch.tensor([len(each.ids) for each in documents], device=self.model.device)
        lesson = Lesson(self.gates, self.recipe, self.rope, lens, read)
        with given(lesson), torch.no_grad():
            self.model.get_decoder()(input_ids=rows.ids, use_cache=False)
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
    with frozen(model), teaching(model):
        yield BlockTrainer(model, gates, recipe, source, rope, data=data, base=base)
