"""A model whose entries fade as gates say, for as long as a context is open.

The attention function is chosen by name, as everywhere in kvkeep, and one forward pre-hook on each attention
module computes log beta of that layer from what enters the module and hands it on as a keyword argument. Both
are undone at the end; no weight and no class is touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvkeep.core.errors import UnsupportedError
from kvkeep.core.spec import ModelSpec
from kvkeep.engine.attending import attending
from kvkeep.engine.attention import restore
from kvkeep.engine.tap import attention_modules, tap_reasons
from kvkeep.gates.modules import RetentionGates
from kvkeep.kernels.retention_attention import Packing, retention_attention

_NAME = "kvkeep_fading"
_ARGUMENT = "kvkeep_fading"


@dataclass
class Tape:
    """What the layers of one forward share.

    Parameters
    ----------
    packing
        Documents of the rows being read.
    gates
        ``None`` reads with everything kept: the teacher.
    log_betas
        What the gates said, by layer.
    attended
        Layers that attended through here.
    """

    packing: Packing | None = None
    gates: RetentionGates | None = None
    log_betas: dict[int, Tensor] = field(default_factory=dict)
    attended: set[int] = field(default_factory=set)
    _masks: dict[int | None, Tensor] = field(default_factory=dict)

    def begin(self, packing: Packing, gates: RetentionGates | None) -> None:
        """Prepare for the next forward."""
        self.packing, self.gates, self.log_betas, self._masks = packing, gates, {}, {}
        self.attended = set()

    def listen(self, layer: int, hidden: Tensor) -> Tensor | None:
        """Log beta of a layer that has a gate, else ``None``."""
        if self.gates is None or layer not in self.gates.shape.layers:
            return None
        log_beta = self.gates(layer, hidden)
        self.log_betas.setdefault(
            layer, log_beta
        )  # a layer computed again in the backward pass says the same
        return log_beta

    def mask(self, window: int | None, device: Any) -> Tensor:
        """bool ``[batch, 1, tokens, tokens]``, made once for all layers."""
        assert self.packing is not None
        if window not in self._masks:
            everything = slice(None)
            self._masks[window] = self.packing.visible(everything, everything, window)[:, None]
        return self._masks[window].to(device)


@contextmanager
def fading(model: PreTrainedModel, spec: ModelSpec) -> Iterator[Tape]:
    """Let a model read packed rows with fading entries.

    Raises
    ------
    UnsupportedError
        If its attention modules cannot be told apart, take no further arguments, or attend in a way of
        their own.
    """
    reasons = tap_reasons(model, spec)
    layers = {layer.index: layer.window for layer in spec.layers}
    found = attention_modules(model, tuple(layers))
    reasons += [
        f"layer {index} has no single attention module" for index in layers if len(found.get(index, ())) != 1
    ]
    if not model._can_set_attn_implementation():
        reasons.append("it does not choose its attention function by name: its entries would not fade")
    if reasons:
        raise UnsupportedError(f"gates cannot be trained on {type(model).__name__}", reasons)
    restore(model)
    tape, hooks = Tape(), []
    try:
        for index, window in layers.items():
            hook = _pass_on(tape, index, window)
            hooks.append(found[index][0].register_forward_pre_hook(hook, with_kwargs=True))
        with attending(model, _NAME, _attend, _no_mask):
            yield tape
    finally:
        for handle in hooks:
            handle.remove()


def _no_mask(**options: Any) -> None:
    """Documents decide who sees whom."""


def _pass_on(tape: Tape, index: int, window: int | None) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        return args, kwargs | {_ARGUMENT: (tape, window, tape.listen(index, hidden))}

    return hook


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function: packed documents; fading entries where the layer has a gate."""
    tape, window, log_beta = kwargs[_ARGUMENT]
    tape.attended.add(module.layer_idx)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if log_beta is None:
        mask = tape.mask(window, query.device)
        grouped = query.shape[1] != key.shape[1]
        out = F.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=grouped)
    else:
        packing = tape.packing.to(query.device)
        out = retention_attention(query, key, value, log_beta.to(query.device), packing, scale)
    return out.transpose(1, 2).contiguous(), None
