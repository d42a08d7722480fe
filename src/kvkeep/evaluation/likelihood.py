"""How well a model predicts a given text under a policy: log-likelihood, teacher-forced.

The text is cut into windows, and each window is read on a cache of its own, ``chunk`` tokens at a time. After
each chunk the policy evicts down to its budget, so that the next chunk sees ``C`` entries and its own tokens
up to each: the lengths ``C+1 … C+chunk`` that a decode step sees under the periodic trigger with a buffer of
``chunk``. With a chunk as long as the buffer, and a budget that is a multiple of it, the result is that of
decoding token by token (a test compares the two), at the price of reading a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from kvkeep.core.errors import ConfigError
from kvkeep.core.policy import Policy
from kvkeep.core.precision import Precision
from kvkeep.engine.generation import cache_argument
from kvkeep.engine.retention_cache import RetentionCache
from kvkeep.engine.surprise import entropy_of


@dataclass(frozen=True, kw_only=True)
class WindowScore:
    """One window of text.

    Parameters
    ----------
    name
        Which window; also its name for the random source.
    nats, tokens
        Per chunk: sum of ``-log p`` of the tokens predicted while it was read, and their number. The first
        token of a window is predicted by nothing and not counted.
    entries
        Per chunk: entries per KV head that its tokens attended to, themselves included, mean over those of
        them that predict a token of the window.
    peak
        Most entries that any head of any layer held.
    full_at
        First chunk that was read after an eviction; ``None`` if nothing was evicted before the last chunk.
    evictions
        Rounds of eviction.
    kv_bytes
        Bytes allocated at most for keys and values of the window's batch, divided by its windows.
    """

    name: int
    nats: tuple[float, ...]
    tokens: tuple[int, ...]
    entries: tuple[float, ...]
    peak: int
    full_at: int | None
    evictions: int
    kv_bytes: int = 0

    def part(self, start: int | None = None, stop: int | None = None) -> tuple[float, int]:
        """Nats and tokens of the chunks ``start`` to ``stop`` (not included)."""
        return sum(self.nats[start:stop]), sum(self.tokens[start:stop])

    @property
    def nats_per_token(self) -> float:
        """Mean of ``-log p`` over the tokens of the window."""
        nats, tokens = self.part()
        return nats / tokens

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def cut(tokens: Sequence[int], window: int, limit: int | None = None) -> Tensor:
    """Cut a text into whole windows; the rest is left out.

    Returns
    -------
    Tensor
        int64 ``[windows, window]``.

    Raises
    ------
    ConfigError
        If the text is shorter than one window, or a window too short to predict anything.

    Examples
    --------
    >>> cut([5, 6, 7, 8, 9], 2).tolist()
    [[5, 6], [7, 8]]
    """
    if window < 2:
        raise ConfigError(f"a window of {window} tokens predicts nothing: give at least 2.")
    if limit is not None and limit < 1:
        raise ConfigError(f"a limit of {limit} windows leaves nothing to read: give at least 1.")
    count = len(tokens) // window
    if count < 1:
        raise ConfigError(
            f"the text has {len(tokens)} tokens, fewer than one window of {window}: give a longer text, or a "
            "shorter window."
        )
    count = count if limit is None else min(count, limit)
    return torch.tensor(list(tokens[: count * window])).view(count, window)


def check_reading(policy: Policy, *, chunk: int, window: int, max_positions: int | None) -> None:
    """Refuse settings under which the cache would not be what it seems.

    Raises
    ------
    ConfigError
        If the policy would not evict while a text is read, would keep all of it as its prompt, or if
        the window does not fit the model.
    """
    if chunk < 1:
        raise ConfigError(f"a chunk of {chunk} tokens reads nothing: give at least 1.")
    if max_positions is not None and window > max_positions:
        raise ConfigError(
            f"a window of {window} tokens is longer than the model's {max_positions} positions: give a "
            "shorter window, or a model made for longer sequences."
        )
    if policy.traits.reads is not None and chunk > 1:
        raise ConfigError(
            f"{policy.name} chooses what a single new token reads; several at once read everything: read "
            "token by token (chunk=1)."
        )
    if policy.traits.trigger.needs_entropy and chunk > 1:
        raise ConfigError(
            f"{policy.name} evicts where the model is unsure of the next token; several at once would evict "
            "at the end of every chunk: read token by token (chunk=1)."
        )
    if not policy.bounded:
        return
    if policy.protects_prompt:
        raise ConfigError(
            f"{policy.name} would keep the whole text, because all of it counts as the prompt: use "
            "prompt='counts' and no protect_prompt."
        )
    if chunk > 1 and policy.traits.trigger.prefill != "chunk":
        raise ConfigError(
            f"{policy.name} with prefill={policy.traits.trigger.prefill!r} would not evict while a text is "
            "read in chunks: build it with prefill='chunk', or read token by token (chunk=1)."
        )


@torch.inference_mode()
def read_windows(
    model: PreTrainedModel,
    policy: Policy,
    windows: Tensor,
    *,
    chunk: int,
    names: Sequence[int] | None = None,
    seed: int = 0,
    calibration: Any = None,
    gates: Any = None,
    precision: Precision | None = None,
    on_chunk: Callable[[int], None] = lambda tokens: None,
    on_losses: Callable[[Tensor], None] = lambda losses: None,
) -> list[WindowScore]:
    """Read some windows as one batch; each is a sequence of its own.

    Parameters
    ----------
    policy
        Built with ``prefill="chunk"``, unless ``chunk`` is 1.
    windows
        int64 ``[batch, tokens]``.
    chunk
        Tokens per forward, and the distance of evictions; 1 decodes, with the policy's own trigger.
    names
        Names of the windows, for results and random numbers; default: 0, 1, 2 …
    seed, calibration, gates, precision
        As in :class:`~kvkeep.RetentionCache`.
    on_chunk
        Called after each forward with the tokens it has read, over all rows.
    on_losses
        Called after each forward with ``-log p`` of what it predicted, ``[batch, tokens]``.

    Raises
    ------
    ConfigError
        As in :func:`check_reading`.
    """
    rows, length = windows.shape
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    check_reading(policy, chunk=chunk, window=length, max_positions=limit)
    names = list(range(rows)) if names is None else list(names)
    cache = RetentionCache(
        model,
        policy,
        seed=seed,
        sequence_ids=names,
        context=length,
        rows=rows,
        calibration=calibration,
        gates=gates,
        precision=precision,
    )
    windows = windows.to(model.device)
    nats: list[list[float]] = []
    counts: list[int] = []
    entries: list[float] = []
    full_at = None
    for start in range(0, length, chunk):
        stop = min(start + chunk, length)
        if full_at is None and cache.trace.evictions:
            full_at = len(counts)
        held = _held(cache)
        logits = model(
            input_ids=windows[:, start:stop],
            position_ids=torch.arange(start, stop, device=windows.device)[None].expand(rows, -1),
            **{cache_argument(model): cache},
        ).logits
        if cache.wants_entropy:
            cache.note_entropy(entropy_of(logits[:, -1]))
        targets = windows[:, start + 1 : stop + 1]
        predicted = logits[:, : targets.shape[1]].flatten(0, 1)
        predicted = predicted.to(torch.promote_types(predicted.dtype, torch.float32))
        losses = cross_entropy(predicted, targets.flatten(), reduction="none").view(targets.shape)
        nats.append(losses.double().sum(-1).tolist())
        on_losses(losses)
        counts.append(targets.shape[1])
        entries.append(held + (targets.shape[1] + 1) / 2)
        on_chunk(rows * (stop - start))
    trace = cache.trace
    return [
        WindowScore(
            name=name,
            nats=tuple(chunk_nats[row] for chunk_nats in nats),
            tokens=tuple(counts),
            entries=tuple(entries),
            peak=trace.peak_entries,
            full_at=full_at,
            evictions=trace.evictions // rows,
            kv_bytes=trace.peak_kv_bytes // rows,
        )
        for row, name in enumerate(names)
    ]


def _held(cache: RetentionCache) -> float:
    """Entries per KV head held now, mean over layers, rows and heads."""
    stores = [layer.store for layer in cache.managed_layers if layer.store is not None]
    return float(np.mean([store.held for store in stores])) if stores else 0.0
