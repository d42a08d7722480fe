"""What a policy may look at: the stored entries of one layer, and what its traits ask for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvkeep.core.errors import ConfigError
from kvkeep.core.random import RandomStream
from kvkeep.core.traits import Traits


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of a layer, as far as policies need it.

    Parameters
    ----------
    inv_freq
        float32 ``[rotary_dim / 2]``: angle per position of each pair (half-split layout: channel
        ``f`` turns with channel ``f + rotary_dim / 2``; channels beyond ``rotary_dim`` do not turn).
    scaling
        Factor on cosine and sine (1 except for YaRN-like scalings).
    """

    inv_freq: Tensor
    scaling: float = 1.0

    @property
    def rotary_dim(self) -> int:
        """Channels that turn."""
        return 2 * int(self.inv_freq.shape[0])


@dataclass(frozen=True)
class QueryMoments:
    """Moments of the un-rotated prompt queries of one layer.

    Parameters
    ----------
    mean
        float32 ``[batch, heads, head_dim]``.
    covariance
        float32 ``[batch, heads, head_dim, head_dim]`` (population).
    """

    mean: Tensor
    covariance: Tensor


_NEEDS = {
    "queries": "queries",
    "query_positions": "queries",
    "attention_sum": "attention_sum",
    "last_attended": "recurrence",
    "longest_pause": "recurrence",
    "query_moments": "query_moments",
    "log_retention": "log_retention",
    "calibration": "calibration",
    "rope": "rope",
    "random": "random",
}

#: Recorded fields that hold a number for each entry.
PER_ENTRY = ("attention_sum", "log_retention", "last_attended", "longest_pause")


@dataclass(frozen=True, kw_only=True)
class LayerView:
    """Stored entries of one layer, read-only, for the sequences that evict now.

    Reading a field that the policy's traits do not declare raises :class:`ConfigError`, so that the
    declaration can be trusted: what is not declared is not recorded.

    Parameters
    ----------
    layer
        Index of the layer in the model.
    keys, values
        ``[batch, kv_heads, entries, head_dim]`` as stored (keys rotated); value_dim may differ.
    positions
        int64 ``[batch, kv_heads, entries]``, ascending along entries.
    valid
        bool, same shape: False for empty slots.
    seq_lens, prompt_lens
        int64 ``[batch]``: tokens seen (the next position), and tokens of the prompt.
    budget, buffer
        Entries kept after this eviction (protected prompt excluded), and the policy's buffer.
    protected
        bool, shape of ``positions``: kept whatever the score.
    traits
        What the policy declared.
    recorded
        The optional fields, by name.
    even
        Every slot of every row holds an entry; known on the host, so code may slice instead of mask.
    recent_kept
        Newest tokens that every eviction of this policy keeps.
    """

    layer: int
    keys: Tensor
    values: Tensor
    positions: Tensor
    valid: Tensor
    seq_lens: Tensor
    prompt_lens: Tensor
    budget: int
    buffer: int
    protected: Tensor
    traits: Traits
    recorded: dict[str, Any] = field(default_factory=dict)
    even: bool = False
    recent_kept: int = 0

    @property
    def candidates(self) -> Tensor:
        """bool ``[batch, kv_heads, entries]``: stored and not protected."""
        return self.valid & ~self.protected

    @property
    def shape(self) -> tuple[int, int, int]:
        """(batch, kv_heads, entries)."""
        batch, heads, entries = self.positions.shape
        return batch, heads, entries

    def recent(self, count: int) -> Tensor:
        """bool, shape of ``positions``: among the newest ``count`` tokens of the sequence."""
        return self.valid & (self.positions >= (self.seq_lens - count)[:, None, None])

    def older_slots(self, count: int) -> int | None:
        """How many leading slots hold just the entries older than the newest ``count`` tokens.

        The newest ``recent_kept`` tokens are never evicted, so in even rows they fill the last slots, and
        work on older entries needs no mask. ``None`` where that is not known on the host.
        """
        entries = self.shape[2]
        return entries - count if self.even and count <= self.recent_kept and count < entries else None

    def _read(self, name: str) -> Any:
        if getattr(self.traits, _NEEDS[name]) in (None, False, 0):
            raise ConfigError(
                f"the policy reads view.{name} but its traits do not declare "
                f"{_NEEDS[name]!r}, so it was not recorded: declare it in the policy's traits."
            )
        return self.recorded[name]

    @property
    def queries(self) -> Tensor:
        """``[batch, heads, window, head_dim]`` rotated, newest last.

        Their product with a key over sqrt(head_dim) is the model's logit, whatever scale the model uses.
        """
        return self._read("queries")  # type: ignore[no-any-return]

    @property
    def query_positions(self) -> Tensor:
        """int64 ``[batch, window]``; -1 where fewer tokens have been seen."""
        return self._read("query_positions")  # type: ignore[no-any-return]

    @property
    def attention_sum(self) -> Tensor:
        """float32 ``[batch, kv_heads, entries]``: attention received so far, mean over the group."""
        return self._read("attention_sum")  # type: ignore[no-any-return]

    @property
    def last_attended(self) -> Tensor:
        """float32 ``[batch, kv_heads, entries]``: position of the last query that attended to the entry."""
        return self._read("last_attended")  # type: ignore[no-any-return]

    @property
    def longest_pause(self) -> Tensor:
        """float32 ``[batch, kv_heads, entries]``: longest pause that attention came back from; or 0."""
        return self._read("longest_pause")  # type: ignore[no-any-return]

    @property
    def query_moments(self) -> QueryMoments:
        """Moments of the un-rotated prompt queries."""
        return self._read("query_moments")  # type: ignore[no-any-return]

    @property
    def log_retention(self) -> Tensor:
        """float32 ``[batch, kv_heads, entries]``: log beta."""
        return self._read("log_retention")  # type: ignore[no-any-return]

    @property
    def calibration(self) -> Any:
        """Calibration statistics of this layer."""
        return self._read("calibration")

    @property
    def rope(self) -> Rope:
        """Rotary embedding of this layer."""
        return self._read("rope")  # type: ignore[no-any-return]

    @property
    def random(self) -> RandomStream:
        """The rows' own random source for this eviction."""
        return self._read("random")  # type: ignore[no-any-return]


def protected_mask(
    *, positions: Tensor, valid: Tensor, seq_lens: Tensor, sinks: int, recent: int, prompt_lens: Tensor | None
) -> Tensor:
    """Entries that stay whatever their score, as a mask.

    Parameters
    ----------
    positions, valid
        ``[batch, kv_heads, entries]``.
    seq_lens
        int64 ``[batch]``.
    sinks, recent
        First and newest tokens of the sequence that are always kept.
    prompt_lens
        int64 ``[batch]`` to keep the whole prompt, else ``None``.
    """
    protected = positions >= (seq_lens - recent)[:, None, None]
    if sinks:
        protected = protected | (positions < sinks)
    if prompt_lens is not None:
        protected = protected | (positions < prompt_lens[:, None, None])
    return torch.logical_and(valid, protected)
