"""Which heads a rank has."""

from __future__ import annotations

import pytest
import torch

from kvkeep.calibration.statistics import LayerStatistics
from kvkeep.serving.ranks import Rank


@pytest.mark.parametrize("size", [1, 2, 4])
def test_statistics_of_query_heads_go_with_them(size: int) -> None:
    """A head would be judged by what another head asks."""
    mean, magnitude = torch.randn(8, 4, dtype=torch.complex64), torch.rand(8, 4)
    whole = {layer: LayerStatistics(mean=layer * mean, magnitude=layer * magnitude) for layer in (1, 3)}
    parts = [Rank(index, size).own(whole) for index in range(size)]
    for layer, statistics in whole.items():
        for name in ("mean", "magnitude"):
            joined = torch.cat([getattr(part[layer], name) for part in parts])
            assert torch.equal(joined, getattr(statistics, name))
            assert all(len(getattr(part[layer], name)) == 8 // size for part in parts)


def test_a_head_on_several_ranks_is_the_same_head() -> None:
    """Copies of one head would draw differently, and keep other entries."""
    assert [Rank(index, 8).first_head(2) for index in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [Rank(index, 2).first_head(8) for index in range(2)] == [0, 4]
