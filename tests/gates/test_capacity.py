"""How many entries gates keep alive: against the double sum, and by hand."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvkeep.gates.capacity import capacity_loss, expected_entries
from kvkeep.kernels.retention_attention import Packing


def packing(*rows: list[int]) -> Packing:
    """Rows of documents of these lengths; a negative length is padding."""
    documents = [[i if n > 0 else -1 for i, n in enumerate(row) for _ in range(abs(n))] for row in rows]
    positions = [[place for n in row for place in range(abs(n))] for row in rows]
    return Packing(torch.tensor(documents), torch.tensor(positions))


def double_sum(log_beta: Tensor, packed: Packing) -> Tensor:
    """The definition."""
    batch, heads, tokens = log_beta.shape
    sums = [
        sum(
            (log_beta[b, h, j] * (t - j)).exp()
            for j in range(t + 1)
            if packed.documents[b, j] == packed.documents[b, t]
        )
        for b in range(batch)
        for h in range(heads)
        for t in range(tokens)
    ]
    return torch.stack(sums).view(batch, heads, tokens)  # type: ignore[arg-type]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 999), st.sampled_from([1, 2, 3, 4, 16]), st.sampled_from([0.01, 1.0, 30.0]))
def test_equals_the_double_sum_with_gradients(seed: int, tile: int, fastest: float) -> None:
    packed = packing([5, 4, -2], [1, 10])
    generator = torch.Generator().manual_seed(seed)
    drawn = -fastest * torch.rand(2, 3, 11, generator=generator, dtype=torch.float64)
    mine, theirs = drawn.clone().requires_grad_(), drawn.clone().requires_grad_()
    out, expected = expected_entries(mine, packed, tile), double_sum(theirs, packed)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
    (out * weight).sum().backward()
    (expected * weight).sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=1e-10)


def test_everything_is_alive_at_beta_one_and_only_the_last_at_beta_zero() -> None:
    packed = packing([3, 4])
    place = packed.positions[:, None].double()
    torch.testing.assert_close(expected_entries(torch.zeros(1, 1, 7).double(), packed), place + 1)
    torch.testing.assert_close(
        expected_entries(torch.full((1, 1, 7), -900.0).double(), packed), torch.ones(1, 1, 7).double()
    )


def entries() -> Tensor:
    """Two layers, one row, two heads, four tokens."""
    return torch.tensor([[[[1.0, 2, 3, 4], [1, 1, 1, 1]]], [[[1, 2, 2, 2], [1, 2, 3, 3]]]]).double()


def test_local_loss_by_hand() -> None:
    # Memory 2. Excess: head 1: 1 at t=2 and 2 at t=3; head 4: 1 at t=2 and 1 at t=3; t - M is 0 (-> 1) and 1.
    assert capacity_loss(entries(), packing([4]), 2, "local").item() == pytest.approx((1 + 2 + 1 + 1) / 4)


def test_global_loss_by_hand() -> None:
    # Sums over 4 heads: 4, 7, 9, 10; memory 2 gives room for 8. L H t - L H M is 0 (-> 1) and 4.
    assert capacity_loss(entries(), packing([4]), 2, "global").item() == pytest.approx((1 / 1 + 2 / 4) / 2)


def test_no_excess_is_no_loss_and_padding_has_none() -> None:
    assert capacity_loss(entries(), packing([4]), 4, "local").item() == 0
    assert capacity_loss(entries(), packing([2, -2]), 2, "local").item() == 0


def test_memory_below_one_is_a_share_of_the_row() -> None:
    here = capacity_loss(entries(), packing([4]), 0.5, "global")
    assert here.item() == capacity_loss(entries(), packing([4]), 2, "global").item() > 0
