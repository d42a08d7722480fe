"""Selection by score: exact counts, stable ties, protection by mask."""

from __future__ import annotations

import pytest
import torch

from kvkeep.core.decision import KeepCounts
from kvkeep.selection.reserve import reserve
from kvkeep.selection.top_k import top_k, top_k_mask
from kvkeep.testing.views import kept
from tests.reference.heads import keep_top


@pytest.mark.parametrize("seed", range(20))
def test_against_sorting(seed: int) -> None:
    """Scores with many ties, rows of different counts, masks of all kinds."""
    source = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 4, (3, 2, 17), generator=source).float()
    protected = torch.rand(3, 2, 17, generator=source) < 0.2
    candidates = (torch.rand(3, 2, 17, generator=source) < 0.8) & ~protected
    room = (protected | candidates).sum(-1)
    per_head = torch.minimum(room, protected.sum(-1) + torch.randint(0, 9, (3, 2), generator=source))
    if seed % 3 == 0:
        per_head = per_head.minimum(per_head.min()).maximum(protected.sum(-1))
    counts = KeepCounts(per_head, int(per_head.max()))
    decision = top_k(scores, counts, candidates=candidates, kept=protected)
    decision.check(valid=protected | candidates, protected=protected, counts=counts)
    for row in range(3):
        for head in range(2):
            expected = keep_top(
                scores[row, head].tolist(),
                int(per_head[row, head]),
                protected[row, head].nonzero().flatten().tolist(),
                candidates[row, head].nonzero().flatten().tolist(),
            )
            assert kept(decision)[row][head] == expected


@pytest.mark.parametrize("wanted", [(3, 3), (3, 1)])
def test_infinite_scores(wanted: tuple[int, int]) -> None:
    """Infinities of either sign are scores like others; the count must still be met."""
    scores = torch.tensor([[[float("-inf"), 1, float("inf"), float("-inf")]] * 2])
    among = torch.ones(1, 2, 4, dtype=torch.bool)
    marked = top_k_mask(scores, torch.tensor([wanted]), 3, among)
    assert marked.sum(-1).tolist() == [list(wanted)]
    assert marked[0, 0].tolist() == [True, True, True, False]


def test_what_may_not_be_chosen_may_hold_anything() -> None:
    """Empty slots hold rubbish, NaN included."""
    scores = torch.tensor([[[1.0, float("nan"), 3, float("inf"), 2]]])
    among = torch.tensor([[[True, False, True, False, True]]])
    marked = top_k_mask(scores, torch.tensor([[2]]), 2, among)
    assert marked[0, 0].tolist() == [False, False, True, False, True]


def test_nothing_wanted() -> None:
    """A head whose protected entries fill its count takes none."""
    among = torch.ones(1, 1, 4, dtype=torch.bool)
    assert not top_k_mask(torch.rand(1, 1, 4), torch.tensor([[0]]), 0, among).any()
    assert not top_k_mask(torch.rand(1, 1, 4), torch.tensor([[0]]), 3, among).any()


def test_reserve_marks_what_is_there() -> None:
    """A reserve larger than the candidates takes them all and no more."""
    magnitudes = torch.tensor([[[5.0, 1, 4, 9]]])
    candidates = torch.tensor([[[True, True, True, False]]])
    assert reserve(magnitudes, 2, candidates=candidates)[0, 0].tolist() == [True, False, True, False]
    assert reserve(magnitudes, 9, candidates=candidates)[0, 0].tolist() == [True, True, True, False]
    assert not reserve(magnitudes, 0, candidates=candidates).any()
