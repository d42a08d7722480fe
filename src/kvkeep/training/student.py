"""One forward of training: the model with everything kept, then with fading entries, and the losses."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvkeep.core.errors import UnsupportedError
from kvkeep.gates.capacity import capacity_loss, expected_entries
from kvkeep.gates.modules import RetentionGates
from kvkeep.kernels.retention_attention import Packing
from kvkeep.training.documents import IGNORED, Rows
from kvkeep.training.fading import Tape
from kvkeep.training.head import LogitHead
from kvkeep.training.losses import prediction_losses
from kvkeep.training.recipe import Recipe

#: How far logits may be off, relative to the largest; bfloat16 reaches half a percent.
_TOLERANCE = 0.03


class Terms(NamedTuple):
    """Losses of one forward (scalars).

    Parameters
    ----------
    total
        What is minimized.
    kl, next_token, full
        Distance to the full cache, next-token loss with fading entries and with the full cache, in nats.
    capacity
        Excess over the memory, as a share.
    alive
        Entries per head at the last token of a document, by the gates, mean over documents.
    """

    total: Tensor
    kl: Tensor
    next_token: Tensor
    full: Tensor
    capacity: Tensor
    alive: Tensor


class Reader:
    """The frozen model. It is no module: nothing that trains, moves or averages modules finds its weights.

    Parameters
    ----------
    model
        With ``tape`` open on it.
    tape
        From :func:`kvkeep.training.fading.fading`.
    """

    def __init__(self, model: PreTrainedModel, tape: Tape) -> None:
        self.tape, self.decoder, self.head = tape, model.get_decoder(), LogitHead(model)

    def hidden(self, rows: Rows, gates: RetentionGates | None) -> Tensor:
        """Last hidden states ``[rows, tokens, hidden_size]``; without gates nothing fades."""
        self.tape.begin(rows.packing, gates)
        out: Tensor = self.decoder(
            input_ids=rows.ids, position_ids=rows.packing.positions, use_cache=False
        ).last_hidden_state
        return out

    @torch.no_grad()
    def logits(self, ids: Tensor) -> Tensor:
        """float32 ``[tokens, vocabulary]`` of one text ``[1, tokens]``, with everything kept."""
        packing = Packing(torch.zeros_like(ids), torch.arange(ids.shape[1], device=ids.device)[None])
        return self.head(self.hidden(Rows(ids, ids, packing), None)[0])


class Student(nn.Module):
    """The gates, and the losses that they are trained with.

    Parameters
    ----------
    gates
        What learns.
    recipe
        Settings.
    reader
        The frozen model.
    """

    def __init__(self, gates: RetentionGates, recipe: Recipe, reader: Reader) -> None:
        super().__init__()
        self.gates, self.recipe, self.reader = gates, recipe, reader

    def forward(self, rows: Rows) -> Terms:
        """Losses of one batch of rows."""
        recipe, learned = self.recipe, rows.targets != IGNORED
        with torch.no_grad():
            teacher = self.reader.hidden(rows, None)[learned]
        student = self.reader.hidden(rows, self.gates)[learned]
        said = self.reader.tape.log_betas
        log_betas = [said[layer] for layer in sorted(said)]
        kl, next_token, full = prediction_losses(
            self.reader.head, student, teacher, rows.targets[learned], recipe.block
        )
        weights = recipe.kl, recipe.next_token
        base = (recipe.kl * kl + recipe.next_token * next_token) / sum(weight > 0 for weight in weights)
        with torch.set_grad_enabled(recipe.capacity > 0 and torch.is_grad_enabled()):
            entries = torch.stack([self.entries(each, rows.packing) for each in log_betas])
        capacity = capacity_loss(entries, rows.packing, recipe.memory, recipe.limit)
        alive = _at_ends(entries.detach().mean((0, 2)), rows.packing)
        total = base + recipe.capacity * capacity
        return Terms(total, kl.detach(), next_token.detach(), full, capacity.detach(), alive)

    @staticmethod
    def entries(log_beta: Tensor, packing: Packing) -> Tensor:
        """:func:`expected_entries` of a layer, computed where the layer is, on the device of the rows."""
        there = packing.to(log_beta.device)
        return expected_entries(log_beta, there).to(packing.documents.device)


def _at_ends(per_token: Tensor, packing: Packing) -> Tensor:
    """Mean of numbers ``[batch, tokens]`` at the last token of each document."""
    documents = packing.documents
    ends = torch.ones_like(documents, dtype=torch.bool)
    ends[:, :-1] = documents[:, 1:] != documents[:, :-1]
    return per_token[ends & packing.real].mean()


def require_plain(model: PreTrainedModel, mine: Tensor, theirs: Tensor) -> None:
    """Refuse a model that training would read otherwise than it reads itself.

    Training has its own attention and its own output; a model whose attention does more than a softmax over
    products (learned sinks, soft caps) would be trained as another model.

    Parameters
    ----------
    mine, theirs
        Logits of the same text, from :meth:`Reader.logits` and from the model.

    Raises
    ------
    UnsupportedError
        If they differ.
    """
    gap = float((mine - theirs).abs().max() / theirs.abs().max().clamp(min=1e-6))
    if not gap < _TOLERANCE:
        raise UnsupportedError(
            f"gates cannot be trained on {type(model).__name__}",
            [f"with plain softmax attention its logits differ by {gap:.1%} of the largest from its own"],
        )
