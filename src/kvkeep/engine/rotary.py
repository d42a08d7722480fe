"""The rotary embedding of a model, for policies that calculate with it."""

from __future__ import annotations

import inspect
import sys

import torch
from torch import Tensor

from kvkeep.core.errors import UnsupportedError
from kvkeep.core.spec import ModelSpec
from kvkeep.core.view import Rope
from kvkeep.kernels.rotation import unrotate

# Rotary scalings whose frequencies change while a sequence grows: keys stored before the change
# and after it disagree, so scores that rely on the frequencies would be wrong.
_DRIFTING = ("dynamic", "longrope")


def rope_of(model: torch.nn.Module, spec: ModelSpec) -> Rope:
    """Find the rotary embedding that the full-attention layers use.

    Raises
    ------
    UnsupportedError
        If there is none, if its frequencies change with the length of the sequence, or if it turns other
        pairs of channels than the two halves.
    """
    reason = "the model has no rotary embedding module named rotary_emb"
    if spec.rope_type in _DRIFTING:
        reason = f"rope type {spec.rope_type!r} changes its frequencies while the sequence grows"
    else:
        for name, module in model.named_modules():
            found = None if "vis" in name or not name.endswith("rotary_emb") else _read(module)
            if found is None:
                continue
            if _turns_halves(module, found, spec.head_dim) is not False:
                return found
            reason = "its rotary embedding turns neighbouring channels, not channel f with f + rotary_dim / 2"
            break
    raise UnsupportedError(
        f"a policy that reads rotary frequencies cannot run on {spec.model_type!r}", [reason]
    )


def _read(module: torch.nn.Module) -> Rope | None:
    for prefix in ("full_attention_", ""):
        inv_freq = getattr(module, f"{prefix}inv_freq", None)
        scaling = getattr(module, f"{prefix}attention_scaling", None)
        if isinstance(inv_freq, Tensor):
            return Rope(inv_freq.detach().float(), float(1.0 if scaling is None else scaling))
    return None


def _turns_halves(module: torch.nn.Module, rope: Rope, head_dim: int) -> bool | None:
    """Try the model's own rotation on a few numbers; ``None`` if it has no function of the usual form."""
    rotate = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
    device = rope.inv_freq.device
    if rotate is None or device.type == "meta":
        return None
    positions = torch.arange(4, device=device)[None]
    layer = (
        {"layer_type": "full_attention"}
        if "layer_type" in inspect.signature(module.forward).parameters
        else {}
    )
    for width in (head_dim, rope.rotary_dim):
        plain = torch.linspace(-1.0, 1.0, 4 * width, device=device).view(1, 1, 4, width)
        try:
            turned, _ = rotate(plain, plain, *module(plain, positions, **layer))
        except (RuntimeError, TypeError, ValueError, IndexError):
            continue  # several position axes, or a rotation that only takes the turning channels
        return torch.allclose(unrotate(turned, positions, rope), plain, atol=1e-3)
    return None
