"""Buffers that the host fills for a device which reads them later: in turns, and none before it was read.

flashinfer's ``plan`` writes into pinned memory and lets the device copy it when it gets there. Ragged layers
need a plan each, and a host that is ahead of the device would overwrite the plan of one layer with that of
the next before the device has copied it: silently wrong attention, or reads outside the pool.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Generic, Protocol, TypeVar

Buffer = TypeVar("Buffer")


class Event(Protocol):
    """What is used of ``torch.cuda.Event``: one that was never recorded does not wait."""

    def record(self) -> None:
        """Mark this point of the current stream."""

    def synchronize(self) -> None:
        """Wait until the device has passed the mark."""


class PlanRing(Generic[Buffer]):
    """Hand out buffers in turn.

    Parameters
    ----------
    slots
        Buffers, each with an event of the stream that reads it.
    """

    def __init__(self, slots: Sequence[tuple[Buffer, Event]]) -> None:
        self._slots = tuple(slots)
        self._next = 0

    @contextlib.contextmanager
    def turn(self) -> Iterator[Buffer]:
        """The next buffer, once the device has read what it held; fill it and start its copy within."""
        buffer, read = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        read.synchronize()
        try:
            yield buffer
        finally:
            read.record()
