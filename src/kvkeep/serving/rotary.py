"""The rotary embedding of a model, from its config alone: vLLM's modules are not transformers' ones."""

from __future__ import annotations

import torch

from kvkeep.core.errors import UnsupportedError
from kvkeep.core.spec import ModelSpec
from kvkeep.core.view import Rope


def rope_of_config(spec: ModelSpec) -> Rope:
    """Rotary frequencies of the full-attention layers.

    Raises
    ------
    UnsupportedError
        If the config states none, or such as change with the length of a sequence.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = getattr(spec.config, "rope_parameters", None) or {}
    parameters = parameters.get("full_attention", parameters)
    if spec.rope_type == "default" and parameters.get("rope_theta"):
        exponent = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32) / spec.rotary_dim
        return Rope(1.0 / parameters["rope_theta"] ** exponent)
    if spec.rope_type in ("dynamic", "longrope") or spec.rope_type not in ROPE_INIT_FUNCTIONS:
        raise UnsupportedError(
            f"a policy that reads rotary frequencies cannot run on {spec.model_type!r}",
            [f"rope type {spec.rope_type!r} has no fixed frequencies"],
        )
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[spec.rope_type](spec.config, torch.device("cpu"))
    return Rope(inv_freq.float(), float(scaling))
