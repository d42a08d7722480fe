"""The attention function that reads handles, registered with transformers by name.

Two things are registered for each stock back end (sdpa, eager, flash attention): an attention function
and a mask function of the same name. Nothing is patched, and a model whose attention is set to the
registered name still runs any other cache, through the stock back end and its stock mask.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvkeep.core.errors import UnsupportedError
from kvkeep.engine.arguments import require_model
from kvkeep.engine.handle import LayerHandle

# Stock back end -> registered name. "flash" must not appear in a name: transformers would look for a
# flash-attention build of that name.
NAMES = {
    "sdpa": "kvkeep_sdpa",
    "eager": "kvkeep_eager",
    "flash_attention_2": "kvkeep_fa2",
    "flash_attention_3": "kvkeep_fa3",
}
_BACKENDS = {name: backend for backend, name in NAMES.items()}

#: Keyword argument under which hidden states reach the attention function (see :mod:`kvkeep.engine.tap`).
HIDDEN = "kvkeep_hidden"


@dataclass
class MaskRequest:
    """What transformers asked of the mask function, kept until it is known who will attend.

    A managed layer needs only the padding; the stock back end needs the whole mask, which is built
    at most once, on demand.
    """

    padding: Tensor | None
    causal: bool
    build: Callable[[], Tensor | None]
    _built: list[Tensor | None] = field(default_factory=list)

    def stock(self) -> Tensor | None:
        """The mask that the stock back end would have been given."""
        if not self._built:
            self._built.append(self.build())
        return self._built[0]


def _mask_function(backend: str) -> Callable[..., Any]:
    stock = ALL_MASK_ATTENTION_FUNCTIONS[backend]

    def mask(*args: Any, **kwargs: Any) -> Any:
        if args or kwargs.get("local_size") is not None:
            return stock(*args, **kwargs)  # sliding and chunked layers keep their own cache and mask
        return MaskRequest(
            padding=kwargs.get("attention_mask"),
            causal=kwargs.get("mask_function", causal_mask_function) is causal_mask_function,
            build=partial(stock, **kwargs),
        )

    return mask


def stock_attention(backend: str, module: torch.nn.Module) -> Callable[..., tuple[Tensor, Any]]:
    """The stock attention function of a back end for this attention module.

    ``eager`` is not registered: each modeling file has its own, which may hold a model's specialities
    (learned sinks, soft caps), so it is taken from there.
    """
    if backend != "eager":
        return ALL_ATTENTION_FUNCTIONS[backend]  # type: ignore[no-any-return]
    home = sys.modules[type(module).__module__]
    function = getattr(home, "eager_attention_forward", None)
    if function is None:
        raise UnsupportedError(
            f"eager attention of {type(module).__name__}",
            [f"{home.__name__} defines no eager_attention_forward: load with attn_implementation='sdpa'"],
        )
    return function  # type: ignore[no-any-return]


def _attention_function(backend: str) -> Callable[..., tuple[Tensor, Any]]:
    def attention(
        module: torch.nn.Module,
        query: Tensor,
        key: Any,
        value: Any,
        attention_mask: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        attend = stock_attention(backend, module)
        if isinstance(key, LayerHandle):
            return key.attend(attend, backend, module, query, attention_mask, kwargs)
        mask = attention_mask.stock() if isinstance(attention_mask, MaskRequest) else attention_mask
        kwargs.pop(HIDDEN, None)
        return attend(module, query, key, value, mask, **kwargs)

    return attention


def prepare(model: PreTrainedModel) -> None:
    """Let a model's attention read kvkeep caches.

    Sets the model's attention implementation to kvkeep's version of the one it has (for example
    ``sdpa`` to ``kvkeep_sdpa``). Other caches go on working as before. :func:`restore` undoes it;
    :class:`~kvkeep.RetentionCache` calls it by itself.

    Raises
    ------
    UnsupportedError
        If the model's attention cannot be chosen by name, or its back end is one kvkeep lacks.
    ConfigError
        If it is no loaded model.
    """
    require_model(model)
    current = attention_name(model)
    if current in _BACKENDS:
        return
    reasons = []
    if current not in NAMES:
        reasons.append(
            f"attention implementation {current!r} is not one of {', '.join(NAMES)}: "
            "load the model with attn_implementation='sdpa'"
        )
    if not model._can_set_attn_implementation():
        reasons.append(f"{type(model).__name__} does not choose its attention function by name")
    if reasons:
        raise UnsupportedError(f"kvkeep cannot prepare {type(model).__name__}", reasons)
    name = NAMES[current]
    if name not in ALL_ATTENTION_FUNCTIONS:
        # NOTE: without a mask function of the same name transformers silently drops causality.
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, _mask_function(current))
        ALL_ATTENTION_FUNCTIONS.register(name, _attention_function(current))
    set_attention(model, name)


def restore(model: PreTrainedModel) -> None:
    """Undo :func:`prepare`: give a model its stock attention back. Does nothing if it has it."""
    current = attention_name(model)
    if current in _BACKENDS:
        set_attention(model, _BACKENDS[current])


def attention_name(model: PreTrainedModel) -> str:
    """The attention implementation of a model's text decoder."""
    return str(model.config.get_text_config(decoder=True)._attn_implementation)


def reads_handles(module: torch.nn.Module) -> bool:
    """Whether the attention function of this attention module is kvkeep's."""
    return getattr(getattr(module, "config", None), "_attn_implementation", None) in _BACKENDS


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Set the attention implementation of a model's text decoder."""
    text = model.config.get_text_config(decoder=True)
    if text is model.config:
        model.set_attn_implementation(name)
        return
    # A composite model: only its text decoder, the vision tower keeps its own attention.
    part = next(key for key in model.config.sub_configs if getattr(model.config, key) is text)
    model.set_attn_implementation({part: name})
