"""Read texts with a full cache and measure every value on its way into it.

Texts are cut into portions that each start at position 0; the cache of a portion is gone before the next is
read, so that memory is bounded by the portion. What is left of an entry is a handful of numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvkeep.analysis.round_trip import Scheme, law, token_error
from kvkeep.analysis.spread import SINKS
from kvkeep.core.errors import ConfigError, UnsupportedError
from kvkeep.core.traits import Traits
from kvkeep.engine.attention import attention_name, prepare, restore
from kvkeep.engine.generation import cache_argument
from kvkeep.engine.layer import RetentionLayer
from kvkeep.engine.retention_cache import RetentionCache
from kvkeep.engine.spec import model_spec
from kvkeep.engine.step import Step
from kvkeep.policies.full import Full
from kvkeep.scoring.retention import retention
from kvkeep.scoring.value_magnitude import Magnitude, value_magnitude
from kvkeep.scoring.window_attention import window_attention

#: What is measured of every value.
MAGNITUDES: tuple[Magnitude, ...] = ("range", "variance", "l2")


@dataclass(frozen=True, kw_only=True)
class Portion:
    """A text, or a part of one, as its cache saw it.

    All tensors are float32 ``[layers, kv_heads, tokens]`` on the CPU; layers are those with full attention.

    Parameters
    ----------
    layers
        Their indices in the model.
    magnitudes
        Range, variance and norm of each value.
    attention
        Mean attention that the last queries of the portion pay to each entry.
    window
        How many queries these are.
    retention
        Log retention at the end of the portion, where gates were given.
    errors, expected
        Mean square error of the round trip by scheme, and what the quadratic law expects.
    """

    layers: tuple[int, ...]
    magnitudes: Mapping[Magnitude, Tensor]
    attention: Tensor
    window: int
    retention: Tensor | None
    errors: Mapping[str, Tensor]
    expected: Mapping[str, Tensor]

    @property
    def tokens(self) -> int:
        """Tokens read."""
        return self.attention.shape[-1]


@dataclass(frozen=True, kw_only=True)
class Listening(Full):
    """The full cache, with the newest queries and what gates say recorded."""

    name: ClassVar[str] = "listening"

    window: int = 64
    gated: bool = False

    @property
    def traits(self) -> Traits:
        return Traits(trigger=self._make_trigger(), queries=self.window, log_retention=self.gated)


class _ListeningCache(RetentionCache):
    """Shows every layer's newest values once they are stored."""

    def __init__(self, *args: Any, hear: Callable[[int, Tensor], None], **options: Any) -> None:
        super().__init__(*args, **options)
        self._hear = hear

    def after_attention(self, layer: RetentionLayer, step: Step) -> None:
        values = layer.stored.padded(None, "values")["values"]
        self._hear(layer.place, values[0, :, -step.query_len :])
        super().after_attention(layer, step)


@torch.inference_mode()
def read_portions(
    model: PreTrainedModel,
    texts: Sequence[Tensor],
    *,
    portion: int = 8192,
    chunk: int = 512,
    window: int = 64,
    schemes: Sequence[Scheme] = (),
    gates: Any = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[Portion]:
    """Measure every value of some texts.

    Parameters
    ----------
    texts
        Token ids, int64 ``[tokens]`` each.
    portion
        Tokens of a portion at most; never more than the model has positions. A rest that is not longer than
        the sinks is left out.
    chunk
        Tokens per forward.
    window
        Queries at the end of a portion whose attention is taken.
    schemes
        Ways to write values down whose errors are wanted.
    gates
        :class:`kvkeep.gates.RetentionGates` of the model.
    progress
        Called with tokens done and tokens in all.

    Raises
    ------
    ConfigError
        If a number is out of range, a group does not fit the head, or there is nothing to read.
    UnsupportedError
        If kvkeep cannot serve the model, or gates do not fit.
    """
    for name, number, least in (("portion", portion, SINKS + 1), ("chunk", chunk, 1), ("window", window, 1)):
        if number < least:
            raise ConfigError(f"{name} {number} leaves nothing to measure: give at least {least}.")
    spec = model_spec(model.config)
    for each in schemes:
        if spec.value_dim % each.group:
            raise ConfigError(
                f"groups of {each.group} channels do not fill a value of {spec.value_dim}: choose a scheme "
                "whose group divides it."
            )
    size = min(portion, spec.max_positions or portion)
    parts = [part for text in texts for part in text.split(size) if len(part) > SINKS]
    if not parts:
        raise ConfigError(
            f"there is nothing to read: a text needs more than {SINKS} tokens, which are sinks."
        )
    total, done = sum(map(len, parts)), 0
    was_prepared, was_training = attention_name(model).startswith("kvkeep_"), model.training
    model.eval()
    try:
        for part in parts:
            before = done

            def on_chunk(read: int, before: int = before) -> None:
                progress(before + read, total)

            yield _read(model, part, chunk, window, tuple(schemes), gates, on_chunk)
            done += len(part)
    finally:
        model.train(was_training)
        (prepare if was_prepared else restore)(model)


def _read(
    model: PreTrainedModel,
    ids: Tensor,
    chunk: int,
    window: int,
    schemes: tuple[Scheme, ...],
    gates: Any,
    on_chunk: Callable[[int], None],
) -> Portion:
    """One portion."""
    found: dict[str, dict[int, list[Tensor]]] = {}

    def note(name: str, place: int, numbers: Tensor) -> None:
        found.setdefault(name, {}).setdefault(place, []).append(numbers.float().cpu())

    def hear(place: int, values: Tensor) -> None:
        for kind in MAGNITUDES:
            note(kind, place, value_magnitude(values[None], kind)[0])
        for each in schemes:
            note(each.name, place, token_error(values, each.round_trip(values)))
            note(f"law {each.name}", place, law(values, bits=each.bits, group=each.group))

    policy = Listening(window=min(window, len(ids)), gated=gates is not None)
    cache = _ListeningCache(model, policy, gates=gates, context=len(ids), hear=hear)
    options: dict[str, Any] = {cache_argument(model): cache}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        options["logits_to_keep"] = 1
    for start in range(0, len(ids), chunk):
        part = ids[None, start : start + chunk].to(model.device)
        model(input_ids=part, use_cache=True, **options)
        on_chunk(start + part.shape[1])
    layers = cache.managed_layers
    if not found or len(found["range"]) != len(layers):
        raise UnsupportedError(
            "values of this model cannot be measured", ["some of its layers did not pass through the cache"]
        )

    def whole(name: str) -> Tensor:
        return torch.stack([torch.cat(found[name][layer.place], -1) for layer in layers])

    return Portion(
        layers=cache.spec.managed,
        magnitudes={kind: whole(kind) for kind in MAGNITUDES},
        attention=torch.stack([_attention(layer) for layer in layers]),
        window=policy.window,
        retention=None if gates is None else torch.stack([_retention(layer) for layer in layers]),
        errors={each.name: whole(each.name) for each in schemes},
        expected={each.name: whole(f"law {each.name}") for each in schemes},
    )


def _attention(layer: RetentionLayer) -> Tensor:
    """Mean attention of the recorded queries: ``[kv_heads, entries]``."""
    ring = layer.recorder.ring
    assert ring is not None  # the traits ask for it
    queries, positions = ring.ordered()
    keys = layer.stored.padded(None, "keys")["keys"]
    return window_attention(queries, positions, keys, None, None, causal=True)[0].cpu()


def _retention(layer: RetentionLayer) -> Tensor:
    """Log retention of every entry now: ``[kv_heads, entries]``."""
    layer.settle()
    stored = layer.stored.padded(None, "extra.log_retention", "positions")
    seen = torch.tensor([layer.stored.longest], device=layer.stored.device)
    return retention(stored["extra.log_retention"], stored["positions"].long(), seen)[0].cpu()
