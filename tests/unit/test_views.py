"""The hand-made views are trustworthy: everything else in this folder stands on them."""

from __future__ import annotations

import torch

import kvkeep
from kvkeep.testing.views import decide, kept, make_view, row_of


def test_views_look_like_the_engines() -> None:
    """If a fixture showed positions the engine never shows, policy tests would prove nothing."""
    policy = kvkeep.VaSEAttnV(budget=24, buffer=8)
    view = make_view(policy, lengths=(32, 25), evicted=9, group=3)
    for row, length in enumerate((32, 25)):
        for head in range(2):
            stored = view.positions[row, head, :length]
            assert bool((stored[1:] > stored[:-1]).all())
            assert stored[-8:].tolist() == list(range(length + 1, length + 9))
            assert stored[:4].tolist() == [0, 1, 2, 3]
    assert int(view.protected.sum()) == 2 * 2 * 12
    assert view.queries.shape == (2, 6, 8, 8)


def test_a_row_alone_decides_as_in_the_batch() -> None:
    """A sequence that evicted differently next to a longer neighbour could not be reproduced."""
    policy = kvkeep.VaSEAttnV(budget=24, buffer=8)
    view = make_view(policy, lengths=(32, 25, 40), evicted=5, group=3)
    together = kept(decide(policy, view))
    for row in range(3):
        assert kept(decide(policy, make_view(policy, **row_of(view, row))))[0] == together[row]
    assert torch.equal(view.positions, make_view(policy, lengths=(32, 25, 40), evicted=5).positions)
