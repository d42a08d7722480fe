"""Peak memory of one arm while others lie beside it, and bytes counted from tensors."""

from __future__ import annotations

import re
import resource
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvkeep.engine.retention_cache import RetentionCache

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakMemory:
    """The most memory in use since the last :meth:`reset`.

    On CUDA the allocator's peak; on a CPU the peak resident set of the process (Linux can start it
    anew; elsewhere it is the peak since the process began, and :attr:`resettable` is False).
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.resettable = device.type == "cuda" or self._clear()
        self.source = "CUDA allocator" if device.type == "cuda" else "resident set of the process"

    @staticmethod
    def _clear() -> bool:
        try:
            _CLEAR.write_text("5")
        except OSError:
            return False
        return True

    def reset(self) -> None:
        """Start anew."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        elif self.resettable:
            self._clear()

    def peak(self) -> int:
        """Bytes."""
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.device))
        found = None
        if _STATUS.exists():
            found = re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text())
        if found is not None:
            return int(found.group(1)) * 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def now(self) -> int:
        """Bytes in use at this moment (0 where the system does not say)."""
        if self.device.type == "cuda":
            return int(torch.cuda.memory_allocated(self.device))
        found = re.search(r"VmRSS:\s+(\d+) kB", _STATUS.read_text()) if _STATUS.exists() else None
        return 0 if found is None else int(found.group(1)) * 1024


def stock_bytes(cache: Any) -> int:
    """Bytes of the key and value tensors of a cache of transformers."""
    tensors = (getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values"))
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))


def retention_bytes(cache: RetentionCache) -> tuple[int, int]:
    """Bytes of keys and values, and bytes of everything recorded beside them."""
    trace = cache.trace
    return trace.kv_bytes + trace.native_bytes, trace.metadata_bytes
