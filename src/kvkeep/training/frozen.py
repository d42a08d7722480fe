"""A model that is only read: no weight learns, nothing drops out, and afterwards all is as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel

from kvkeep.core.errors import KvkeepError, UnsupportedError
from kvkeep.engine.attention import attention_name, restore, set_attention


@contextmanager
def frozen(model: PreTrainedModel) -> Iterator[None]:
    """Freeze a model and give it its stock attention for as long as the context is open.

    Raises
    ------
    KvkeepError
        If a weight was written to meanwhile.
    """
    attention = attention_name(model)  # kvkeep's own, where a cache of the model is still in use
    asked = {weight: weight.requires_grad for weight in model.parameters()}
    modes = {module: module.training for module in model.modules()}
    versions = {name: weight._version for name, weight in model.named_parameters()}
    try:
        restore(model)
        model.eval().requires_grad_(False)
        yield
        changed = [name for name, weight in model.named_parameters() if weight._version != versions[name]]
        if changed:
            raise KvkeepError(f"training wrote to weights of the model: {changed[:3]}. Load it again.")
    finally:
        for module, mode in modes.items():
            module.training = mode
        for weight, wanted in asked.items():
            weight.requires_grad_(wanted)
        set_attention(model, attention)


@contextmanager
def recomputing(model: PreTrainedModel) -> Iterator[None]:
    """Let layers compute their activations again in the backward pass.

    transformers does so in training mode only. The layers alone are put into it and not what is in them:
    dropout inside them stays off.

    Raises
    ------
    UnsupportedError
        If the model's class has no activation checkpointing.
    """
    layers = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
    before = [(module.gradient_checkpointing, _function(module), module.training) for module in layers]
    try:
        try:
            _switch(model, "enable", {"use_reentrant": False})
        except ValueError as error:
            raise UnsupportedError(
                f"activations of {type(model).__name__} cannot be computed twice",
                [f"{str(error).rstrip('.')}: train without checkpointing"],
            ) from error
        for module in layers:
            module.training = True
        yield
    finally:
        _switch(model, "disable")
        for module, (flag, function, mode) in zip(layers, before, strict=True):
            module.gradient_checkpointing, module.training = flag, mode
            if function is not None:
                module._gradient_checkpointing_func = function


def _function(module: object) -> object:
    return getattr(module, "_gradient_checkpointing_func", None)


def _switch(model: PreTrainedModel, what: str, *options: object) -> None:
    """Switch activation checkpointing under whichever name this version of transformers has for it."""
    new = getattr(model, f"activation_checkpointing_{what}", None)
    (new or getattr(model, f"gradient_checkpointing_{what}"))(*options)
