"""The gates themselves: hidden states in, log beta out. Plain modules, trainable."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from kvkeep.core.files import tensor_digest
from kvkeep.core.spec import ModelSpec
from kvkeep.gates.shape import GateShape

# The published start: beta is 1 - 1.5e-8, so an untrained gate forgets nothing.
OPEN = 18.0


class LayerGate(nn.Module):
    """What one layer has of its own: ``Linear, activation``, once or twice, and its own projection if untied.

    Parameters
    ----------
    shape
        Sizes.
    """

    def __init__(self, shape: GateShape) -> None:
        super().__init__()
        self.first = nn.Linear(shape.hidden_size, shape.width)
        self.second = nn.Linear(shape.width, shape.width) if shape.architecture == "rg10" else None
        self.act = ACT2FN[shape.activation]
        self.out = None if shape.tied else nn.Linear(shape.width, shape.rows)

    def features(self, hidden: Tensor) -> Tensor:
        """``[..., hidden_size]`` to ``[..., width]``."""
        features = self.act(self.first(hidden))
        return features if self.second is None else self.act(self.second(features))


class RetentionGates(nn.Module):
    """One gate for every full-attention layer of a model.

    Parameters
    ----------
    shape
        Sizes and sharing.
    bias
        What the last projection starts with: 18 (published recipes) keeps everything.

    Source
    ------
    TrimKV, arXiv 2512.03324 (``rg``), and DBTrimKV, arXiv 2605.09649 (``rg10``); official code ngocbh/trimkv.

    Examples
    --------
    >>> import torch
    >>> shape = GateShape(architecture="rg10", tied=True, model_type="llama", hidden_size=8, kv_heads=2,
    ...                   layers=(0, 1), activation="silu", width=4)
    >>> gates = RetentionGates(shape)
    >>> gates(1, torch.zeros(3, 5, 8)).shape
    torch.Size([3, 2, 5])
    """

    def __init__(self, shape: GateShape, *, bias: float = OPEN) -> None:
        super().__init__()
        self.shape = shape
        #: Hash of the weights of the model that they were trained beside; ``None`` if nobody said.
        self.base: str | None = None
        self.layers = nn.ModuleDict({str(index): LayerGate(shape) for index in shape.layers})
        self.shared = nn.Linear(shape.width, shape.rows) if shape.tied else None
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
        for last in self.projections():
            nn.init.constant_(last.bias, bias)

    def projections(self) -> list[nn.Linear]:
        """The last projections: one if they are tied, else one per layer."""
        if self.shared is not None:
            return [self.shared]
        return [gate.out for gate in self.layers.values()]  # type: ignore[misc]

    def forward(self, layer: int, hidden: Tensor) -> Tensor:
        """Log beta of new tokens.

        Parameters
        ----------
        layer
            Index of the layer in the model.
        hidden
            ``[batch, tokens, hidden_size]``: what enters the attention block, after its input norm.

        Returns
        -------
        Tensor
            float32 ``[batch, kv_heads, tokens]``, not positive. Never beta itself: it would round to 1.
        """
        gate: LayerGate = self.layers[str(layer)]  # type: ignore[assignment]
        weight = gate.first.weight
        features = gate.features(hidden.to(weight.device, weight.dtype))
        last = self.shared if gate.out is None else gate.out
        assert last is not None  # tied and own projections exclude each other
        logits = last(features.to(last.weight.device)).float()
        log_beta = F.logsigmoid(logits).transpose(1, 2).to(hidden.device)
        return log_beta.expand(-1, self.shape.kv_heads, -1)

    def check(self, spec: ModelSpec) -> list[str]:
        """Reasons why the gates do not fit a model; empty if they do."""
        return self.shape.check(spec)

    @property
    def sha256(self) -> str:
        """Hash of all weights, whatever file they came from."""
        return tensor_digest({name: each.cpu().contiguous() for name, each in self.state_dict().items()})
