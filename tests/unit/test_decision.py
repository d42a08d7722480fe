"""Keep decisions: masks to indices, and the check that tests rely on."""

from __future__ import annotations

import pytest
import torch

from kvkeep.core.decision import KeepCounts, KeepDecision
from kvkeep.core.errors import CacheIntegrityError
from kvkeep.testing.views import kept


@pytest.mark.parametrize("seed", range(10))
def test_from_mask(seed: int) -> None:
    """Indices ascend and name exactly the marked entries, also when heads keep different numbers."""
    mask = torch.rand(3, 2, 11, generator=torch.Generator().manual_seed(seed)) < 0.5
    mask[0, 0] = seed % 2 == 0  # all or none
    largest = int(mask.sum(-1).max())
    decision = KeepDecision.from_mask(mask, KeepCounts(mask.sum(-1), largest))
    assert decision.max_kept == largest
    assert kept(decision) == [[head.nonzero().flatten().tolist() for head in row] for row in mask]
    assert bool(((decision.indices >= 0) & (decision.indices < 11)).all())


def check(
    indices: list[int], length: int, *, protected: tuple[int, ...] = (), count: int | None = None
) -> None:
    """Check a decision about five slots of which the last is empty."""
    valid = torch.tensor([[[True, True, True, True, False]]])
    guard = torch.zeros(1, 1, 5, dtype=torch.bool)
    guard[..., list(protected)] = True
    decision = KeepDecision(torch.tensor([[indices]]), torch.tensor([[length]]))
    counts = None if count is None else KeepCounts(torch.tensor([[count]]), count)
    decision.check(valid=valid, protected=guard, counts=counts)


def test_a_good_decision_passes() -> None:
    """What stands beyond the length does not matter."""
    check([0, 2, 3], 3, protected=(3,), count=3)
    check([1, 3, 0], 2, count=2)


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        ({"indices": [0, 9], "length": 2}, "an index is out of range"),
        ({"indices": [-1, 2], "length": 2}, "an index is out of range"),
        ({"indices": [2, 1], "length": 2}, "indices are not strictly ascending"),
        ({"indices": [2, 2], "length": 2}, "indices are not strictly ascending"),
        ({"indices": [1, 4], "length": 2}, "an empty slot was kept"),
        ({"indices": [1, 2], "length": 2, "protected": (3,)}, "a protected entry was evicted"),
        ({"indices": [1, 3], "length": 1, "protected": (3,)}, "a protected entry was evicted"),
        ({"indices": [1, 2], "length": 2, "count": 3}, "counts [[2]] differ from those asked for, [[3]]"),
    ],
)
def test_a_wrong_decision_is_found(call: dict, problem: str) -> None:
    """A check that lets something pass would make every test above it worthless."""
    with pytest.raises(CacheIntegrityError) as error:
        check(**call)
    assert str(error.value).startswith("a policy returned a wrong decision: ")
    assert problem in str(error.value)
