"""When a policy evicts: `+ surprise`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from kvkeep.core.traits import Traits, Trigger
from kvkeep.policies.wrapped import Wrapped


@dataclass(frozen=True, kw_only=True)
class Surprise(Wrapped):
    """Evict where the model is unsure of what comes next, instead of every so many tokens.

    A model that hesitates has ended one thought and chooses the next: what the last queries looked at
    belongs to a whole step then, and is not cut in the middle. A sequence evicts between
    ``budget + buffer / 2`` and ``budget + 2 * buffer`` stored entries, after the first token that was drawn
    from a distribution of at least ``threshold`` nats; at the upper end in any case.

    Parameters
    ----------
    base
        Gives everything else.
    threshold
        Entropy of the next-token distribution at temperature 1, in nats. 0 evicts every ``buffer / 2``
        tokens; infinity (``1e9``) every ``2 * buffer``.

    Source
    ------
    Ours, for the study of the design space. Segments that begin at surprises are those of EM-LLM (arXiv
    2407.09450), which cuts its memory there.

    Deviations
    ----------
    EM-LLM takes the surprise of the token that came, relative to a running mean. The entropy of what could
    have come is known before the token is chosen, in every loop that writes; the threshold is absolute.

    Notes
    -----
    The cache must be told (``cache.note_entropy``): ``kvkeep.generate``, ``kvkeep eval`` and ``kvkeep
    perplexity`` (which reads token by token then) do so. Memory is laid out for ``budget + 2 * buffer``
    entries. The mean cache depends on the text: match it before comparing.

    Examples
    --------
    >>> from kvkeep.policies.snapkv import SnapKV
    >>> Surprise(base=SnapKV(budget=512), threshold=1.0).name
    'snapkv + surprise(threshold=1.0)'
    """

    part: ClassVar[str] = "surprise"

    threshold: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "trigger", "surprise")

    def _make_trigger(self) -> Trigger:
        return Trigger(decode="surprise", prefill=self.prefill, threshold=self.threshold)

    @property
    def traits(self) -> Traits:
        return dataclasses.replace(self.base.traits, trigger=self._make_trigger())


# Parts that say when evictions happen, with the options each takes; each may stand after a "+".
CADENCES: dict[str, tuple[str, ...]] = {"surprise": ("threshold",)}
