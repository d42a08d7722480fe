"""R-KV: attention minus redundancy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from kvkeep.core.traits import Traits
from kvkeep.core.view import LayerView
from kvkeep.policies.ranked import RankedPolicy
from kvkeep.scoring.redundancy import redundancy
from kvkeep.scoring.window_attention import window_attention


@dataclass(frozen=True, kw_only=True)
class RKV(RankedPolicy):
    """Keep entries that are attended to and that say something new.

    Reasoning repeats itself, and repeated passages are attended to as well, so attention alone fills
    the cache with copies. Each entry therefore pays for how much its key resembles the other keys; the
    newest of several copies is let off, so that one of them stays.

    Parameters
    ----------
    budget
        Entries kept per KV head and layer.
    buffer
        Period of the evictions, in tokens.
    variant
        ``"original"``: window of 8, maximum over query heads, max-pool of 7, the newest copy let off,
        ``lam=0.1``. ``"vase"``: what the VaSE study ran under the name R-KV: window = buffer, mean over query
        heads, average pool of 5, no copy let off, ``lam=0.5``.
    window
        Newest queries that score, and newest entries always kept; ``None`` is the variant's.
    lam
        Weight of attention against redundancy, from 0 to 1; ``None`` is the variant's.
    threshold
        Cosine above which two keys are copies (original: 0.5; the other variant ignores it).

    Source
    ------
    R-KV, arXiv 2505.24133, and its official code; variant ``"vase"`` after arXiv 2606.03928, mode
    ``attn_rkv``.

    Deviations
    ----------
    Evicts every 64 tokens like all policies here; the official code every 128 (``buffer=128``). Survivors
    stay in the order of their positions, so "newest copy" means the newest in the text at every
    eviction. The class default of the official code is ``lam=0.07``; its instructions say 0.1.

    Notes
    -----
    The mean similarity of all pairs costs as much as one pass over the keys. Only the letting-off
    compares pairs; it walks back from the newest keys and stops when every key has its copy.

    Examples
    --------
    >>> RKV(budget=1024).recent, RKV(budget=1024, variant="vase").recent
    (8, 64)
    """

    name: ClassVar[str] = "r-kv"
    recent_option: ClassVar[str] = "window"

    variant: Literal["original", "vase"] = "original"
    window: int | None = None
    lam: float | None = None
    threshold: float = 0.5

    def __post_init__(self) -> None:
        known = ("original", "vase")
        self._require(self.variant in known, f"variant {self.variant!r} is none of {known}")
        self._require(self.window is None or self.window >= 1, f"window {self.window} is below 1 query")
        self._require(self.lam is None or 0 <= self.lam <= 1, f"lam {self.lam} is outside [0, 1]")
        self._require(0 <= self.threshold <= 1, f"threshold {self.threshold} is outside [0, 1]")
        super().__post_init__()

    @property
    def recent(self) -> int:
        """The observation window: its own entries are not candidates."""
        if self.window is not None:
            return self.window
        return 8 if self.variant == "original" else self.buffer

    @property
    def traits(self) -> Traits:
        return Traits(trigger=self._make_trigger(), queries=self.recent)

    def score(self, view: LayerView) -> Tensor:
        """``lam * attention - (1 - lam) * redundancy``; both sum to about one over the entries."""
        original = self.variant == "original"
        older = view.valid & ~view.recent(self.recent)
        attention = window_attention(
            view.queries,
            view.query_positions,
            view.keys,
            view.positions,
            older,
            group_reduce="logit_max" if original else "prob_mean",
            pool="max" if original else "avg",
            kernel=7 if original else 5,
            stop=view.older_slots(self.recent),
        )
        repeats = redundancy(
            view.keys,
            view.valid if original else older,
            threshold=self.threshold if original else None,
        )
        default = 0.1 if original else 0.5
        lam = default if self.lam is None else self.lam
        return lam * attention - (1 - lam) * repeats
