"""Plans that the host writes and a device copies when it gets there."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvkeep.kernels.plan_ring import PlanRing


class LateDevice:
    """Does what it is told in order, and only when somebody waits for it."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    def catch_up(self, until: int) -> None:
        """Do the first of what is waiting."""
        now, self.waiting = self.waiting[:until], self.waiting[until:]
        for each in now:
            each()


class Mark:
    """An event of that device."""

    def __init__(self, device: LateDevice) -> None:
        self.device, self.passed = device, True

    def record(self) -> None:
        """Pass when the device gets here."""
        self.passed = False
        self.device.waiting.append(lambda: setattr(self, "passed", True))

    def synchronize(self) -> None:
        """Let the device work until it has passed."""
        while not self.passed:
            self.device.catch_up(1)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_no_plan_is_overwritten_before_it_was_read(size: int) -> None:
    """Else layer 1 attends by the plan of layer 2, or to pages that are not its own."""
    device = LateDevice()
    ring = PlanRing([([None], Mark(device)) for _ in range(size)])
    read: list[int | None] = []
    for layer in range(11):
        with ring.turn() as pinned:
            pinned[0] = layer
            device.waiting.append(lambda pinned=pinned: read.append(pinned[0]))
    device.catch_up(len(device.waiting))
    assert read == list(range(11))


def test_the_host_may_be_ahead_by_the_size_of_the_ring() -> None:
    """Waiting for every layer would leave the device idle between them."""
    device = LateDevice()
    ring = PlanRing([([None], Mark(device)) for _ in range(4)])
    for _ in range(4):
        with ring.turn():
            pass
    assert len(device.waiting) == 4
    with ring.turn():
        assert len(device.waiting) == 3
