"""How fast this device moves memory, and the time below which no decode step can fall."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from kvkeep.benchmarking.timing import Clock

_BUFFER = {"cpu": 256 << 20, "cuda": 1 << 30}


@dataclass(frozen=True, kw_only=True)
class Bandwidth:
    """Measured memory traffic.

    Parameters
    ----------
    copy_bytes_per_second
        Bytes read plus bytes written by a copy of one preallocated buffer to another, best of the
        repeats.
    buffer_bytes
        Size of the buffer.
    """

    copy_bytes_per_second: float
    buffer_bytes: int

    def floor_seconds(self, read_bytes: float) -> float:
        """Least time in which so many bytes can be read."""
        return read_bytes / self.copy_bytes_per_second

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def measure_bandwidth(
    device: torch.device, *, buffer_bytes: int | None = None, repeats: int = 7
) -> Bandwidth:
    """Copy a buffer that fits no cache, several times; the best one counts.

    The best and not the median: a floor must not rise because the machine was busy for a moment.
    """
    size = buffer_bytes or _BUFFER.get(device.type, 256 << 20)
    source = torch.ones(size // 4, device=device)
    target = torch.zeros_like(source)
    clock = Clock(device)
    seconds = min(clock.measure(lambda: target.copy_(source)) for _ in range(repeats + 1))
    return Bandwidth(copy_bytes_per_second=2 * source.nbytes / seconds, buffer_bytes=source.nbytes)
