"""Expected attention: what queries like the prompt's will look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvkeep.core.traits import Traits
from kvkeep.core.view import LayerView
from kvkeep.policies.ranked import RankedPolicy
from kvkeep.scoring.expected_attention import expected_attention
from kvkeep.scoring.lengths import lengths


@dataclass(frozen=True, kw_only=True)
class ExpectedAttention(RankedPolicy):
    """Keep the entries that queries like those of the prompt will attend to, times their value length.

    Before rotation the queries of a head are close to normally distributed. Their mean and covariance
    over the prompt, turned to the positions ahead, give the attention that each key can expect in
    closed form, without any particular query.

    Parameters
    ----------
    budget, buffer
        Entries kept per KV head and layer; newest always kept, and period of the evictions.
    sinks
        First tokens always kept, outside the expectation (code: 4).
    horizon
        Positions ahead that the rotation is averaged over (code: 512).
    use_covariance, use_value_norm
        Ablations: the mean query alone; attention without the length of the value.
    epsilon
        Added to the attention before the value length multiplies it (code: 0).

    Source
    ------
    Expected Attention, in NVIDIA's kvpress at 8bb29b9. The first 4 positions of the prompt are left out
    of the moments.

    Deviations
    ----------
    The code compresses a prompt once; here it repeats while decoding, with the prompt's moments, and
    keeps the newest entries (``prefill="after", trigger="never"`` compresses the prompt once).

    Notes
    -----
    The engine sums a covariance per query head while it reads the prompt: head_dim² float32 numbers
    per head, layer and sequence.

    Examples
    --------
    >>> ExpectedAttention(budget=512).traits.query_moments
    True
    """

    name: ClassVar[str] = "expected-attention"
    mass: ClassVar[bool] = True

    sinks: int = 4
    horizon: int = 512
    use_covariance: bool = True
    use_value_norm: bool = True
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        self._require(
            isinstance(self.horizon, int) and self.horizon >= 1,
            f"horizon {self.horizon!r} is not a whole number of at least 1",
        )
        self._require(self.epsilon >= 0, f"epsilon {self.epsilon} is negative")
        super().__post_init__()

    @property
    def traits(self) -> Traits:
        return Traits(trigger=self._make_trigger(), query_moments=True, rope=True)

    def score(self, view: LayerView) -> Tensor:
        """Expected attention times value length."""
        shares = expected_attention(
            view.keys,
            view.valid & (view.positions >= self.sinks),
            view.seq_lens,
            view.query_moments,
            view.rope,
            horizon=self.horizon,
            use_covariance=self.use_covariance,
        )
        shares = shares + self.epsilon
        if not self.use_value_norm:
            return shares
        return shares * lengths(view.values)
