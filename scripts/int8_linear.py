"""Linear layers in int8 for a CPU, such that a token's result does not depend on the others of its batch."""

import warnings

import torch
from torch import Tensor, nn


class Int8Linear(nn.Module):
    """A linear layer in int8: weights per output channel, activations per token.

    ``quantize_dynamic`` of torch has one scale for all activations of a batch: one token with large
    activations (the first of a prompt often has them) then rounds those of the others to nothing, and a text
    depends on its neighbours. Here each row is divided by its largest magnitude first, and a row that
    holds 1 and -1 is added, so that the scale is the same for every batch.

    Parameters
    ----------
    linear
        Layer to replace; it can be freed afterwards.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        scales = (weight.abs().amax(1).double() / 127).clamp_min(1e-30)
        zeros = torch.zeros(len(scales), dtype=torch.long)
        with warnings.catch_warnings():  # int8 tensors are deprecated, and nothing else is as fast on AVX2
            warnings.simplefilter("ignore", UserWarning)
            packed = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
        self.packed = torch.ops.quantized.linear_prepack(packed, None)
        self.bias = None if linear.bias is None else linear.bias.detach().float()
        ends = torch.zeros(1, linear.in_features)
        ends[0, 0], ends[0, 1] = 1, -1
        self.register_buffer("ends", ends, persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Float32 ``[..., in_features]`` to float32 ``[..., out_features]``."""
        rows = inputs.reshape(-1, inputs.shape[-1])
        sizes = rows.abs().amax(-1, keepdim=True).clamp_min(1e-30)
        # True: 7 bits for activations, because sums of two products overflow 16 bits with 8 on AVX2.
        made = torch.ops.quantized.linear_dynamic(torch.cat([rows / sizes, self.ends]), self.packed, True)
        outputs = made[:-1] * sizes
        if self.bias is not None:
            outputs = outputs + self.bias
        return outputs.reshape(*inputs.shape[:-1], -1)


def to_int8(model: nn.Module) -> int:
    """Replace all linear layers of a model in place, one after another; return how many there were."""
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear)
    ]
    for parent, name, child in found:
        setattr(parent, name, Int8Linear(child))
        child.weight = nn.Parameter(torch.empty(0), requires_grad=False)  # free it now
    return len(found)
