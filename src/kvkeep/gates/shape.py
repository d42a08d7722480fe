"""What a set of gates looks like, and which models it fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Self

from kvkeep.core.errors import ConfigError
from kvkeep.core.spec import ModelSpec

Architecture = Literal["rg", "rg10"]
ARCHITECTURES: tuple[str, ...] = ("rg", "rg10")


@dataclass(frozen=True, kw_only=True)
class GateShape:
    """Sizes of the gates of one model.

    Parameters
    ----------
    architecture
        ``"rg"`` (TrimKV): one hidden layer. ``"rg10"`` (DBTrimKV): two.
    tied
        One last projection for all layers, so that their retentions are on one scale (``rg10``).
    scalar
        One row of the last projection for all KV heads, instead of one for each.
    width
        Channels of the hidden layers (code: 512).
    activation
        Name of the activation in transformers: the model's own.
    model_type, hidden_size, kv_heads, layers
        Of the model; ``layers`` are the indices of the full-attention ones.

    Raises
    ------
    ConfigError
        If they contradict each other.
    """

    architecture: Architecture
    tied: bool
    model_type: str
    hidden_size: int
    kv_heads: int
    layers: tuple[int, ...]
    activation: str
    width: int = 512
    scalar: bool = False

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise ConfigError(f"gate architecture {self.architecture!r} is none of {ARCHITECTURES}.")
        if self.tied and self.architecture == "rg":
            raise ConfigError(
                "gates of architecture 'rg' have no shared projection: use 'rg10', or tied=False."
            )

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        architecture: Architecture = "rg10",
        *,
        tied: bool | None = None,
        scalar: bool = False,
        width: int = 512,
    ) -> Self:
        """The gates that fit a model.

        Parameters
        ----------
        spec
            Of the model (:func:`kvkeep.engine.spec.model_spec`).
        tied
            ``None``: as the architecture was published.
        """
        config = spec.config
        return cls(
            architecture=architecture,
            tied=architecture == "rg10" if tied is None else tied,
            scalar=scalar,
            width=width,
            activation=activation_of(config),
            model_type=spec.model_type,
            hidden_size=config.hidden_size,
            kv_heads=spec.kv_heads,
            layers=spec.managed,
        )

    @property
    def rows(self) -> int:
        """Outputs of the last projection."""
        return 1 if self.scalar else self.kv_heads

    def check(self, spec: ModelSpec) -> list[str]:
        """Reasons why the gates do not fit a model; empty if they do."""
        theirs = {
            "model_type": spec.model_type,
            "hidden_size": spec.config.hidden_size,
            "kv_heads": spec.kv_heads,
            "layers": spec.managed,
        }
        return [
            f"the gates were made for {name} {getattr(self, name)!r}, the model has {value!r}"
            for name, value in theirs.items()
            if getattr(self, name) != value
        ]


def activation_of(config: Any) -> str:
    """Name of a model's activation, however its config spells the field."""
    for name in ("hidden_act", "hidden_activation", "activation_function"):
        found = getattr(config, name, None)
        if isinstance(found, str):
            return found
    return "silu"
