"""Small arrays from the host to the device, without waiting for the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(array: NDArray[Any], device: torch.device) -> Tensor:
    """An array on a device; on the CPU the array itself.

    A copy from ordinary memory to a GPU first waits for everything that the GPU still has to do, and with
    that undoes vLLM's asynchronous scheduling. From pinned memory it is queued behind it.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return tensor
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # kept by torch until the copy is done
    return tensor.to(device, non_blocking=True)
