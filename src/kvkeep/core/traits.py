"""What a policy declares about itself, so that the engine records just that and nothing more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvkeep.core.errors import ConfigError

Scope = Literal["layer", "model"]
Readers = Literal["query", "kv"]
DecodeTrigger = Literal["periodic", "slack", "clock", "surprise", "never"]
PrefillTrigger = Literal["defer", "after", "chunk"]

_DECODE: tuple[str, ...] = ("periodic", "slack", "clock", "surprise", "never")
_PREFILL: tuple[str, ...] = ("defer", "after", "chunk")


@dataclass(frozen=True, kw_only=True)
class Trigger:
    """The rule that says when an eviction happens.

    Parameters
    ----------
    decode
        After a decode step, with ``n`` entries stored, budget ``C`` and buffer ``B``:
        ``"periodic"`` when ``n > C`` and ``n - C`` is a multiple of ``B`` (VaSE: with ``C`` a multiple of
        ``B`` this is ``n mod B == 0``); ``"slack"`` when ``n >= C + B`` (TriAttention); ``"clock"`` when
        ``n >= C`` and the number of tokens seen is a multiple of ``B`` (R-KV); ``"surprise"`` when the token
        was drawn from an entropy of at least ``threshold`` and ``n >= C + B / 2``, or when
        ``n >= C + 2 B``; ``"never"``.
    prefill
        For tokens that arrive several at a time: ``"defer"`` leaves them to the decode trigger;
        ``"after"`` evicts once, when the whole prompt has been read and before the first new token
        is stored; ``"chunk"`` evicts after every chunk, so memory stays bounded while a long
        prompt is read.
    threshold
        Of the trigger ``"surprise"``, in nats.
    """

    decode: DecodeTrigger = "periodic"
    prefill: PrefillTrigger = "defer"
    threshold: float = 0.5

    def __post_init__(self) -> None:
        if self.decode not in _DECODE:
            raise ConfigError(f"trigger {self.decode!r} is unknown: use one of {', '.join(_DECODE)}.")
        if self.prefill not in _PREFILL:
            raise ConfigError(
                f"prefill trigger {self.prefill!r} is unknown: use one of {', '.join(_PREFILL)}."
            )
        if self.threshold < 0:
            raise ConfigError(f"threshold {self.threshold} is negative: an entropy is at least 0 nats.")

    @property
    def needs_entropy(self) -> bool:
        """Whether the engine must say how unsure the model was of each token."""
        return self.decode == "surprise"

    def room(self, buffer: int) -> int:
        """Entries above the budget that decoding needs: ``B``, or ``2 B`` where a surprise is waited for."""
        return 2 * buffer if self.decode == "surprise" else buffer

    def fullest(self, *, stored: int, budget: int, buffer: int) -> int:
        """Entries that a sequence holds at most before its next eviction, from so many on."""
        if self.decode == "surprise":
            return max(budget + self.room(buffer), stored + 1)
        periods = 1 if stored <= budget + buffer else (stored - budget) // buffer + 1
        return budget + periods * buffer

    def due(self, *, stored: int, seen: int, budget: int, buffer: int, entropy: float | None = None) -> bool:
        """Whether a sequence evicts after this decode step, whose token was drawn from ``entropy`` nats."""
        if stored <= budget:
            return False
        if self.decode == "surprise":
            waited = 2 * (stored - budget) >= buffer
            surprised = entropy is not None and entropy >= self.threshold
            return (waited and surprised) or stored >= budget + 2 * buffer
        if self.decode == "periodic":
            return (stored - budget) % buffer == 0
        if self.decode == "slack":
            return stored >= budget + buffer
        return self.decode == "clock" and seen % buffer == 0


@dataclass(frozen=True, kw_only=True)
class Reads:
    """How a selector reads: what the engine keeps per block of entries for it, and who chooses.

    Parameters
    ----------
    block
        Entries of a block, the unit of reading; a block's first position is a multiple of it.
    chosen_by
        ``"query"``: every query head reads blocks of its own. ``"kv"``: the query heads of a KV head read the
        same ones.
    bounds
        Smallest and largest key of each block, channel by channel, are needed.
    gates
        What trained block gates say of each block is needed.
    dense_layers
        First layers that read everything.
    """

    block: int = 16
    chosen_by: Readers = "kv"
    bounds: bool = False
    gates: bool = False
    dense_layers: int = 0


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What a policy looks at and how it decides.

    Parameters
    ----------
    scope
        ``"layer"``: each layer decides alone, right after its attention. ``"model"``: one decision
        over all layers, after the last of them.
    trigger
        When evictions happen.
    queries
        How many of the newest rotated queries the engine must record (0: none, and no ring is kept).
    attention_sum
        Accumulated attention per entry is needed (exact, over every query so far).
    recurrence
        When each entry was last attended to, and the longest pause before, are needed; the number is the
        attention above which an entry counts as attended to.
    query_moments
        Mean and covariance of the un-rotated prompt queries are needed.
    log_retention
        Learned log beta per entry is needed.
    calibration
        Calibration statistics of the model are needed.
    rope
        The rotary frequencies of the model are needed.
    random
        The policy draws random numbers.
    merges
        Evictions change values of what is kept (:meth:`~kvkeep.core.policy.Policy.merge`).
    exact_budget
        After an eviction every head holds exactly the count it was given.
    ragged
        Heads may keep different numbers of entries: the engine lays out the paged store.
    shared
        Layers share a selection: they cannot hold different numbers of entries.
    trained
        The policy needs trained weights.
    reads
        The policy keeps everything and chooses what is read (:class:`~kvkeep.core.selector.Selector`);
        ``None``: all that is stored is read.
    """

    scope: Scope = "layer"
    trigger: Trigger = Trigger()
    queries: int = 0
    attention_sum: bool = False
    recurrence: float | None = None
    query_moments: bool = False
    log_retention: bool = False
    calibration: bool = False
    rope: bool = False
    random: bool = False
    merges: bool = False
    exact_budget: bool = True
    ragged: bool = False
    shared: bool = False
    trained: bool = False
    reads: Reads | None = None

    @property
    def attends(self) -> bool:
        """Whether the attention of every query must be worked out."""
        return self.attention_sum or self.recurrence is not None

    @property
    def extras(self) -> tuple[str, ...]:
        """Numbers that are kept per entry beside key, value and position."""
        kept = {"attention_sum": self.attention_sum, "log_retention": self.log_retention}
        kept |= dict.fromkeys(("idle_start", "longest_pause"), self.recurrence is not None)
        return tuple(name for name, wanted in kept.items() if wanted)

    @property
    def gated(self) -> bool:
        """Whether gates of some kind must be given."""
        return self.log_retention or (self.reads is not None and self.reads.gates)
