"""Around a training: the model is frozen, read through the gates, and put back as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from kvkeep.core.errors import ConfigError, KvkeepError
from kvkeep.engine.attention import restore
from kvkeep.engine.spec import model_spec
from kvkeep.gates.modules import RetentionGates
from kvkeep.training.documents import Documents
from kvkeep.training.fading import fading
from kvkeep.training.recipe import Recipe
from kvkeep.training.student import Reader, Student, require_plain
from kvkeep.training.trainer import Trainer

_CHECKED_TOKENS = 32


@contextmanager
def training(
    model: PreTrainedModel, documents: Documents, recipe: Recipe, base: str, accelerator: Any = None
) -> Iterator[Trainer]:
    """Prepare a run; at the end the model is as it was.

    Parameters
    ----------
    model
        A causal language model of transformers.
    documents
        What to read.
    recipe
        Settings.
    base
        Hash of the model's weights.
    accelerator
        One of your own, with ``gradient_accumulation_steps=recipe.accumulate``.

    Raises
    ------
    ConfigError
        If model and accelerator are on different devices, or accelerate is not installed.
    UnsupportedError
        With every reason, if gates cannot be trained on the model.
    """
    if accelerator is None:
        accelerator = make_accelerator(recipe, cpu=model.device.type == "cpu")
    if not _same(model.device, accelerator.device):
        raise ConfigError(
            f"the model is on {model.device} and accelerate trains on {accelerator.device}: move the model "
            "there, or choose the device with CUDA_VISIBLE_DEVICES."
        )
    spec = model_spec(model.config)
    torch.manual_seed(recipe.seed)
    gates = RetentionGates(recipe.shape(spec), bias=recipe.bias).to(accelerator.device)
    restore(model)
    versions = {name: weight._version for name, weight in model.named_parameters()}
    asked = {name: weight.requires_grad for name, weight in model.named_parameters()}
    was_training = model.training
    model.eval().requires_grad_(False)
    ids = documents.batch(0).ids[:1, :_CHECKED_TOKENS].to(accelerator.device)
    with torch.no_grad():
        theirs = model(input_ids=ids, use_cache=False).logits[0].float()
    try:
        with fading(model, spec) as tape:
            reader = Reader(model, tape)
            require_plain(model, reader.logits(ids), theirs)
            if recipe.checkpointing:
                _checkpointing(model, "enable", {"use_reentrant": False})
                model.train()  # layers are computed again in training mode only; attention drops nothing out
            yield Trainer(Student(gates, recipe, reader), documents, recipe, accelerator, base)
        changed = [name for name, weight in model.named_parameters() if weight._version != versions[name]]
        if changed:
            raise KvkeepError(f"training wrote to weights of the model: {changed[:3]}. Load it again.")
    finally:
        if recipe.checkpointing:
            _checkpointing(model, "disable")
        model.train(was_training)
        for name, weight in model.named_parameters():
            weight.requires_grad_(asked[name])


def _checkpointing(model: PreTrainedModel, what: str, *options: Any) -> None:
    """Switch activation checkpointing under whichever name this version of transformers has for it."""
    new = getattr(model, f"activation_checkpointing_{what}", None)
    (new or getattr(model, f"gradient_checkpointing_{what}"))(*options)


def _same(one: torch.device, other: torch.device) -> bool:
    """Whether two names mean one device: ``cuda`` is ``cuda:0``."""
    return one.type == other.type and (one.index or 0) == (other.index or 0)


def make_accelerator(recipe: Recipe, **options: Any) -> Any:
    """Make an accelerator for a recipe.

    Raises
    ------
    ConfigError
        If accelerate is not installed.
    """
    try:
        from accelerate import Accelerator  # type: ignore[import-untyped]
    except ImportError as error:
        raise ConfigError('training gates needs accelerate: pip install "kvkeep[train]".') from error
    return Accelerator(gradient_accumulation_steps=recipe.accumulate, **options)
