"""Reading a model: its layers, and every reason why it cannot be served."""

from __future__ import annotations

from typing import Any

from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvkeep.core.errors import UnsupportedError
from kvkeep.core.spec import LayerSpec, ModelSpec


def model_spec(config: Any) -> ModelSpec:
    """Describe a model from its config alone (no weights are needed).

    Raises
    ------
    UnsupportedError
        With every reason, if kvkeep cannot serve the model correctly.
    """
    text = config.get_text_config(decoder=True)
    reasons = _refusals(config, text)
    layers: tuple[LayerSpec, ...] = ()
    if not reasons:
        layers = tuple(_layers(text, reasons))
        if not any(layer.kind == "full_attention" for layer in layers) and not reasons:
            reasons.append("no layer is full attention: all layers bound their own memory already")
    if reasons:
        raise UnsupportedError(f"kvkeep cannot manage the cache of {text.model_type!r}", reasons)
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    rope = getattr(text, "rope_parameters", None)
    if rope and "rope_type" not in rope:
        # Models with one rotary per kind of layer nest their parameters by kind.
        rope = rope.get("full_attention", rope)
    partial = (rope or {}).get("partial_rotary_factor", None) or getattr(text, "partial_rotary_factor", 1.0)
    return ModelSpec(
        model_type=text.model_type,
        layers=layers,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        value_dim=getattr(text, "v_head_dim", None) or head_dim,
        max_positions=getattr(text, "max_position_embeddings", None),
        rope_type=(rope or {}).get("rope_type") if rope else None,
        rotary_dim=int(head_dim * (partial or 1.0)),
        config=text,
    )


def _refusals(config: Any, text: Any) -> list[str]:
    reasons = []
    if getattr(config, "is_encoder_decoder", False) or getattr(text, "is_encoder_decoder", False):
        reasons.append("it is an encoder-decoder: cross-attention has a second cache")
    if getattr(text, "add_cross_attention", False):
        reasons.append("its layers have cross-attention")
    if getattr(text, "kv_lora_rank", None):
        reasons.append(
            "every layer is multi-head latent attention (MLA): it caches one latent for all heads, "
            "not keys and values per head"
        )
    if getattr(text, "num_kv_shared_layers", 0):
        reasons.append(
            f"its last {text.num_kv_shared_layers} layers read the cache of earlier layers, which an "
            "eviction would change under them"
        )
    if getattr(text, "is_causal", True) is False or getattr(text, "use_bidirectional_attention", False):
        reasons.append("its attention is bidirectional")
    if getattr(text, "num_attention_heads", None) is None:
        reasons.append("its config states no attention heads")
    return reasons


def _layers(text: Any, reasons: list[str]) -> list[LayerSpec]:
    """Ask transformers which cache layer each decoder layer would get."""
    native = DynamicCache(config=text).layers
    count = getattr(text, "num_hidden_layers", 0)
    if len(native) != count:
        reasons.append(f"transformers plans {len(native)} cache layers for {count} decoder layers")
    layers = []
    for index, layer in enumerate(native):
        if type(layer) is DynamicLayer:
            layers.append(LayerSpec(index=index, kind="full_attention"))
        elif isinstance(layer, DynamicSlidingWindowLayer):
            window = getattr(layer, "sliding_window", None)
            layers.append(LayerSpec(index=index, kind="sliding_attention", window=window))
        elif not hasattr(layer, "keys") or type(layer).__name__ == "LinearAttentionLayer":
            layers.append(LayerSpec(index=index, kind="recurrent"))
        else:
            reasons.append(f"layer {index} needs a {type(layer).__name__}, which kvkeep cannot replace")
    return layers
