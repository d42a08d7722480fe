"""Run a model over a text and average its queries as they were before the rotary embedding."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvkeep.calibration.statistics import Provenance, QuerySums, Statistics
from kvkeep.core.errors import ConfigError, UnsupportedError
from kvkeep.core.view import Rope
from kvkeep.engine.attention import attention_name, prepare, restore
from kvkeep.engine.generation import cache_argument
from kvkeep.engine.layer import RetentionLayer
from kvkeep.engine.retention_cache import RetentionCache
from kvkeep.engine.rotary import rope_of
from kvkeep.engine.spec import model_spec
from kvkeep.engine.step import Step
from kvkeep.kernels.rotation import unrotate
from kvkeep.policies.full import Full

# Text beyond so many characters per wanted token is not even tokenized.
_CHARACTERS_PER_TOKEN = 32
# Tokens of the check of the rotary layout, and how far they are moved: half a turn of the fastest pair.
_CHECKED_TOKENS, _CHECKED_SHIFT = 8, 3


class ObservedCache(RetentionCache):
    """A full cache that shows the queries of every layer to an observer.

    What the attention function receives is what the model really asks, whatever it did before (fused
    projections, query norms, partial rotation): nothing of that has to be known here.

    Parameters
    ----------
    observe
        Called with layer index, queries ``[batch, heads, new, head_dim]`` (rotated) and their
        positions ``[batch, new]``.
    context
        Tokens to lay out memory for.
    """

    def __init__(
        self, model: PreTrainedModel, observe: Callable[[int, Tensor, Tensor], None], context: int
    ) -> None:
        super().__init__(model, Full(), context=context)
        self._observe = observe

    def open_step(self, layer: RetentionLayer, query: Tensor, request: Any) -> Step:
        """Every layer passes here with its queries."""
        step = super().open_step(layer, query, request)
        self._observe(layer.index, query, step.positions(query.device))
        return step


def capture(
    model: PreTrainedModel,
    text: str | Tensor | Sequence[int],
    *,
    tokenizer: Any = None,
    max_tokens: int = 32768,
    chunk: int = 1024,
    progress: Callable[[int, int], None] | None = None,
) -> Statistics:
    """Measure the query statistics that TriAttention needs, on any text.

    The text is read in chunks with a full cache. Where it is longer than the model's positions, it is
    read in pieces that each start at position 0.

    Parameters
    ----------
    model
        A causal language model of transformers. Its attention function is put back afterwards.
    text
        Text, or token ids (one sequence).
    tokenizer
        Turns text into ids; not needed for ids.
    max_tokens
        Tokens to read at most (paper: 50,000 to 960,000 give the same statistics; code: 32768).
    chunk
        Tokens per forward.
    progress
        Called with tokens done and tokens in all after each chunk.

    Raises
    ------
    ConfigError
        If there is no token to read, or a number is out of range.
    UnsupportedError
        If kvkeep cannot serve the model, or cannot turn its queries back.

    Source: TriAttention (arXiv 2604.04921), calibration. Queries are taken after query norms, which the
    official script skips, and without the rotary scaling, which it applies once too often.
    """
    for name, number in (("max_tokens", max_tokens), ("chunk", chunk)):
        if number < 1:
            raise ConfigError(f"{name} {number} is below 1 token.")
    spec = model_spec(model.config)
    rope = rope_of(model, spec)
    ids, digest = _read(text, tokenizer, max_tokens)
    was_prepared, was_training = attention_name(model).startswith("kvkeep_"), model.training
    model.eval()
    try:
        _check_layout(model, rope, ids)
        sums = {index: QuerySums(rope) for index in spec.managed}

        def observe(index: int, queries: Tensor, positions: Tensor) -> None:
            sums[index].add(unrotate(queries.float(), positions, rope))

        piece = min(len(ids), spec.max_positions or len(ids))
        for start in range(0, len(ids), piece):
            cache = ObservedCache(model, observe, context=piece)
            for begin in range(start, min(start + piece, len(ids)), chunk):
                end = min(begin + chunk, start + piece, len(ids))
                _forward(model, ids[begin:end], cache)
                if progress is not None:
                    progress(end, len(ids))
    finally:
        model.train(was_training)
        (prepare if was_prepared else restore)(model)
    return Statistics(
        layers={index: layer.finish() for index, layer in sums.items()},
        model_type=spec.model_type,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        rope_type=spec.rope_type,
        rope=Rope(rope.inv_freq.cpu(), rope.scaling),
        provenance=_provenance(model, len(ids), digest),
    )


def _read(text: str | Tensor | Sequence[int], tokenizer: Any, max_tokens: int) -> tuple[Tensor, str]:
    """Token ids, one sequence, and the hash of what was given."""
    if isinstance(text, str):
        if tokenizer is None:
            raise ConfigError("text was given without a tokenizer: pass tokenizer=..., or token ids.")
        digest = hashlib.sha256(text.encode()).hexdigest()
        ids = torch.tensor(
            tokenizer(text[: max_tokens * _CHARACTERS_PER_TOKEN])["input_ids"], dtype=torch.int64
        )
    else:
        ids = torch.as_tensor(text, dtype=torch.int64).cpu().squeeze()
        if ids.ndim != 1:
            raise ConfigError(f"token ids of shape {tuple(ids.shape)} are not one sequence.")
        digest = hashlib.sha256(ids.numpy().astype(np.dtype("<i8")).tobytes()).hexdigest()
    if not len(ids):
        raise ConfigError("the text is empty: calibration needs at least one token, better thousands.")
    return ids[:max_tokens], digest


@torch.no_grad()
def _forward(model: PreTrainedModel, ids: Tensor, cache: RetentionCache, **options: Any) -> None:
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        options["logits_to_keep"] = 1  # nobody reads them, and a chunk of them is larger than the cache
    model(input_ids=ids[None].to(model.device), use_cache=True, **{cache_argument(model): cache}, **options)


def _check_layout(model: PreTrainedModel, rope: Rope, ids: Tensor) -> None:
    """Make sure that queries can be turned back: the same tokens read further on must ask the same.

    A rotary embedding makes attention depend on distances alone, so shifting all positions changes
    nothing of a query but its rotation.
    """
    ids = ids[:_CHECKED_TOKENS]
    found: dict[int, Tensor] = {}
    for shift in (0, _CHECKED_SHIFT):

        def observe(index: int, queries: Tensor, positions: Tensor, shift: int = shift) -> None:
            found.setdefault(shift, unrotate(queries.float(), positions + shift, rope))

        positions = torch.arange(shift, shift + len(ids), device=model.device)[None]
        _forward(model, ids, ObservedCache(model, observe, context=len(ids)), position_ids=positions)
    here, further = found[0], found[_CHECKED_SHIFT]
    gap = (here - further).norm(dim=-1) / here.norm(dim=-1).clamp(min=1e-12)
    if not float(gap.max()) < 0.1:
        raise UnsupportedError(
            f"cannot calibrate {model.config.model_type!r}",
            [
                "its queries change with the position even when they are turned back: its rotary embedding "
                "is not the half-split one (channel f with f + rotary_dim / 2), or a weight is not finite"
            ],
        )


def _provenance(model: PreTrainedModel, tokens: int, digest: str) -> Provenance:
    from kvkeep import __version__

    return Provenance(
        model=str(getattr(model.config, "_name_or_path", "") or "").rstrip("/").rsplit("/", 1)[-1],
        tokens=tokens,
        text_sha256=digest,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        kvkeep_version=__version__,
    )
