"""Let the attention function see what its module was given: the input of retention gates.

A gate reads the hidden states that enter the attention block. The attention function gets queries, keys and
values only, so a forward pre-hook on each attention module passes the hidden states on, as one more keyword
argument. Nothing is kept between calls, and nothing happens unless the model's attention is kvkeep's. The
hooks go with the last cache that needs them.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from kvkeep.core.errors import UnsupportedError
from kvkeep.core.spec import ModelSpec
from kvkeep.engine.attention import HIDDEN, reads_handles


def tap_reasons(model: PreTrainedModel, spec: ModelSpec) -> list[str]:
    """Reasons why the hidden states of a model cannot be passed on; empty if they can."""
    found = attention_modules(model, spec.managed)
    missing = [index for index in spec.managed if len(found.get(index, ())) != 1]
    if missing:
        return [f"no single attention module was found for layers {missing}: gates cannot read its input"]
    closed = [
        type(modules[0]).__name__
        for modules in found.values()
        if not any(
            each.kind is inspect.Parameter.VAR_KEYWORD
            for each in inspect.signature(modules[0].forward).parameters.values()
        )
    ]
    return [f"{name} takes no further arguments: gates cannot read its input" for name in sorted(set(closed))]


def attention_modules(model: PreTrainedModel, layers: Sequence[int]) -> dict[int, list[nn.Module]]:
    """The attention modules of a model by layer: those that know their layer and whether they are causal."""
    found: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int) and index in layers and hasattr(module, "is_causal"):
            found.setdefault(index, []).append(module)
    return found


def tap(model: PreTrainedModel, spec: ModelSpec, owner: Any) -> None:
    """Pass hidden states on to the attention function for as long as ``owner`` lives.

    Raises
    ------
    UnsupportedError
        With every reason, if the model does not allow it.
    """
    reasons = tap_reasons(model, spec)
    if reasons:
        raise UnsupportedError(f"retention gates cannot run on {type(model).__name__}", reasons)
    for (module,) in attention_modules(model, spec.managed).values():
        _LINES.setdefault(module, _Line()).hold(module, owner)


class _Line:
    """The hook on one module, and how many caches it serves."""

    def __init__(self) -> None:
        self.owners = 0
        self.hook: RemovableHandle | None = None

    def hold(self, module: nn.Module, owner: Any) -> None:
        """Serve one more cache, until it is gone."""
        if self.hook is None:
            self.hook = module.register_forward_pre_hook(_pass_on, with_kwargs=True)
        self.owners += 1
        weakref.finalize(owner, self.release).atexit = False

    def release(self) -> None:
        """One cache less; after the last one the module is as it was."""
        self.owners -= 1
        if self.owners == 0 and self.hook is not None:
            self.hook.remove()
            self.hook = None


# One hook per module however many caches: a line lives as long as its module.
_LINES: weakref.WeakKeyDictionary[nn.Module, _Line] = weakref.WeakKeyDictionary()


def _pass_on(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if not reads_handles(module):
        return None
    hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    return args, kwargs | {HIDDEN: hidden}
