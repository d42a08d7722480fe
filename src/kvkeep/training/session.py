"""Around a training: the model is frozen, read through the gates, and put back as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvkeep.core.errors import ConfigError, UnsupportedError
from kvkeep.engine.spec import model_spec
from kvkeep.gates.modules import RetentionGates
from kvkeep.training.documents import Documents
from kvkeep.training.fading import fading
from kvkeep.training.frozen import frozen, recomputing
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
        One of your own, with ``gradient_accumulation_steps=recipe.accumulate`` and no mixed precision.

    Raises
    ------
    ConfigError
        If accelerate is not installed, or the accelerator does not suit model and recipe.
    UnsupportedError
        With every reason, if gates cannot be trained on the model.
    """
    if accelerator is None:
        accelerator = make_accelerator(recipe, cpu=model.device.type == "cpu")
    _check(accelerator, recipe, model.device)
    spec = model_spec(model.config)
    with torch.random.fork_rng(devices=()):  # the caller's random state is none of our business
        torch.manual_seed(recipe.seed)
        gates = RetentionGates(recipe.shape(spec), bias=recipe.bias).to(accelerator.device)
    ids = documents.batch(0).ids[:1, :_CHECKED_TOKENS].to(accelerator.device)
    with frozen(model):
        with torch.no_grad():
            theirs = model(input_ids=ids, use_cache=False).logits[0].float()
        with fading(model, spec) as tape:
            reader = Reader(model, tape)
            student = Student(gates, recipe, reader)
            mine = reader.logits(ids)
            require_plain(model, mine, theirs)
            _require_attended(model, tape.attended, {layer.index for layer in spec.layers})
            trainer = Trainer(student, documents, recipe, accelerator, base)
            if not recipe.checkpointing:
                yield trainer
                return
            with recomputing(model):
                _require_same(model, reader.logits(ids), mine)
                yield trainer


def _require_attended(model: PreTrainedModel, found: set[int], all_layers: set[int]) -> None:
    """Refuse a model with layers that would go on as ever: nothing fades, and no loss would show it."""
    if missing := sorted(all_layers - found):
        raise UnsupportedError(
            f"gates cannot be trained on {type(model).__name__}",
            [f"layers {missing} do not attend through the function that transformers lets one choose"],
        )


def _require_same(model: PreTrainedModel, twice: Tensor, once: Tensor) -> None:
    """Refuse a model whose layers drop something out when they are asked to compute twice."""
    if not torch.equal(twice, once):
        raise UnsupportedError(
            f"activations of {type(model).__name__} cannot be computed twice",
            [
                "in training mode its layers compute something else (dropout): set it to 0 in the model's "
                "config, or train without checkpointing"
            ],
        )


def _check(accelerator: Any, recipe: Recipe, device: torch.device) -> None:
    """Refuse an accelerator that would train otherwise than the recipe says."""
    if not _same(device, accelerator.device):
        raise ConfigError(
            f"the model is on {device} and accelerate trains on {accelerator.device}: move the model "
            "there, or choose the device with CUDA_VISIBLE_DEVICES."
        )
    if accelerator.gradient_accumulation_steps != recipe.accumulate:
        raise ConfigError(
            f"the accelerator steps after {accelerator.gradient_accumulation_steps} forwards and the recipe "
            f"after {recipe.accumulate}: take make_accelerator(recipe), or set both alike."
        )
    if accelerator.mixed_precision != "no":
        raise ConfigError(
            f"the accelerator computes in {accelerator.mixed_precision}, which rounds what gates say: choose "
            "mixed_precision='no', and load the model in bfloat16 for speed."
        )


def _same(one: torch.device, other: torch.device) -> bool:
    """Whether two names mean one device: ``cuda`` is ``cuda:0``."""
    return one.type == other.type and (one.index or 0) == (other.index or 0)


def make_accelerator(recipe: Recipe, **options: Any) -> Any:
    """Make an accelerator for a recipe.

    What decides the result stands in the recipe. So neither the environment nor what `accelerate config` once
    wrote down has a say in it: gates compute in float32, and the model in the type that it was loaded in.

    Raises
    ------
    ConfigError
        If accelerate is not installed.
    """
    try:
        from accelerate import Accelerator  # type: ignore[import-untyped]
        from accelerate.utils import GradientAccumulationPlugin  # type: ignore[import-untyped]
    except ImportError as error:
        raise ConfigError('training gates needs accelerate: pip install "kvkeep[train]".') from error
    plugin = GradientAccumulationPlugin(num_steps=recipe.accumulate)
    return Accelerator(gradient_accumulation_plugin=plugin, mixed_precision="no", **options)
