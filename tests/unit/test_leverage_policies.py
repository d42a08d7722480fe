"""cur and vase-dkv: leverage of keys and values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvkeep
from kvkeep.core.errors import ConfigError
from kvkeep.core.policy import Policy
from kvkeep.core.view import LayerView
from kvkeep.scoring.leverage import LEVERAGES, gaussian_projection, leverage, squared_norms
from kvkeep.testing.views import SHAPES, decide, kept, make_view
from tests.reference import cur
from tests.reference.heads import heads, keep_by_score


def check(policy: Policy, view: LayerView, block: int, projections: list[Any] | None = None) -> None:
    """Compare scores and decision with the reference."""
    combine = getattr(policy, "combine", "kv_product")
    scores, answer = policy.score(view), kept(decide(policy, view))
    for row, parts in enumerate(heads(view)):
        for number, head in enumerate(parts):
            expected = cur.score(
                head,
                recent=policy.buffer,
                combine=combine,
                block=block,
                projection=None if projections is None else projections[row],
            )
            mine = scores[row, number, : head.size]
            torch.testing.assert_close(mine, torch.tensor(expected), atol=1e-7, rtol=1e-4)
            assert answer[row][number] == keep_by_score(head, expected, 24)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("combine", LEVERAGES)
class TestAgainstTheReference:
    """A wrong factor or block would hand the cache to the loudest passage."""

    @pytest.mark.parametrize("block", [0, 5, 16])
    def test_exact(self, shape: dict[str, Any], combine: Any, block: int) -> None:
        """kvpress' form: exact lengths, shares within blocks."""
        policy = kvkeep.CurDKV(budget=24, buffer=8, combine=combine, local_window=block)
        check(policy, make_view(policy, **shape), block)

    def test_fixed_projection(self, shape: dict[str, Any], combine: Any) -> None:
        """The VaSE study's form: one projection for keys and values, the same at every eviction."""
        policy = kvkeep.CurDKV(budget=24, buffer=8, combine=combine, rank=6, local_window=0)
        rows = len(shape["lengths"])
        dim = max(shape.get("head_dim", 8), shape.get("value_dim", 0))
        view = make_view(policy, **shape, evictions=[4] * rows)
        projections = gaussian_projection(view.random.persistent, dim, 6).double().tolist()
        check(policy, view, 0, projections)

    def test_fresh_projection(self, shape: dict[str, Any], combine: Any) -> None:
        """vase-dkv draws anew each time; otherwise it is the same rule."""
        policy = kvkeep.VaSEDKV(budget=24, buffer=8, combine=combine, rank=6)
        rows = len(shape["lengths"])
        dim = max(shape.get("head_dim", 8), shape.get("value_dim", 0))
        view = make_view(policy, **shape, evictions=[4] * rows)
        projections = gaussian_projection(view.random, dim, 6).double().tolist()
        check(policy, view, 0, projections)


def test_fixed_means_fixed() -> None:
    """CurDKV reuses its projection through a generation, VaSE-DKV never does: the only difference."""
    for kind, same in ((kvkeep.CurDKV, True), (kvkeep.VaSEDKV, False)):
        policy = kind(budget=24, buffer=8, rank=6, **({"local_window": 0} if same else {}))
        scores = [policy.score(make_view(policy, evictions=[index])) for index in (0, 1)]
        assert torch.equal(*scores) is same
    policy = kvkeep.CurDKV(budget=24, buffer=8, rank=6)
    for other in ({"layer": 1}, {"sequence_ids": [5]}, {"run_seed": 1}):
        assert not torch.equal(policy.score(make_view(policy)), policy.score(make_view(policy, **other)))


def test_rows_have_their_own_projection_and_heads_share_it() -> None:
    """Per-row draws are worth one to two points in the study; heads of a row share the matrix."""
    policy = kvkeep.VaSEDKV(budget=24, buffer=8, rank=3)
    keys = torch.randn(1, 1, 40, 8).expand(2, 2, 40, 8).contiguous()
    scores = policy.score(make_view(policy, keys=keys, values=keys))
    assert torch.equal(scores[0, 0], scores[0, 1])
    assert not torch.allclose(scores[0, 0], scores[1, 0])


def test_identity_projection_is_exact() -> None:
    """Methods 2.9, invariant 4: with G = identity the ranking is that of the exact lengths."""
    vectors = torch.randn(1, 2, 30, 8)
    exact, seen = squared_norms(vectors), squared_norms(vectors, torch.eye(8)[None])
    torch.testing.assert_close(exact, seen)


def test_projection_is_unbiased() -> None:
    """||x G||^2 has mean ||x||^2 and relative deviation sqrt(2/r): scaled wrongly, both would be off."""
    policy = kvkeep.VaSEDKV(budget=24, buffer=8)
    view = make_view(policy, lengths=[40] * 3000, kv_heads=1, head_dim=2)
    projection = gaussian_projection(view.random, 16, 20)
    vector = torch.randn(3000, 1, 1, 16, generator=torch.Generator().manual_seed(0))
    ratio = (squared_norms(vector, projection) / squared_norms(vector)).flatten()
    assert float(ratio.mean()) == pytest.approx(1, abs=4 * (0.1 / 3000) ** 0.5)
    assert float(ratio.std()) == pytest.approx(0.1**0.5, rel=0.06)


def test_shares_by_hand() -> None:
    """Blocks of two: 1:3 and 1:1 become shares, then the product is normalised."""
    norms = torch.tensor([[[1.0, 3.0, 5.0, 5.0, 2.0]]])
    among = torch.ones(1, 1, 5, dtype=torch.bool)
    answer = leverage(norms, torch.ones(1, 1, 5), among, combine="key", block=2)
    torch.testing.assert_close(answer[0, 0], torch.tensor([0.25, 0.75, 0.5, 0.5, 1.0]) / 3)
    product = leverage(norms, norms, among & (norms < 5))
    torch.testing.assert_close(product[0, 0], torch.tensor([1.0, 9, 0, 0, 4]) / 14)


def test_zero_vectors() -> None:
    """All-zero keys or values must give zeros, not 0/0."""
    policy = kvkeep.CurDKV(budget=24, buffer=8)
    zeros = torch.zeros(1, 2, 40, 4)
    assert policy.score(make_view(policy, keys=zeros, values=zeros)).abs().sum() == 0
    decide(policy, make_view(policy, keys=zeros, values=zeros))


@pytest.mark.parametrize("kind", [kvkeep.CurDKV, kvkeep.VaSEDKV])
def test_long_float16_vectors(kind: type[Policy]) -> None:
    """Sums beyond 65504 would be infinite in float16, and their ratio NaN."""
    policy = kind(budget=24, buffer=8)
    keys = 20000 * torch.randn(1, 2, 40, 16).clamp(-2, 2)
    scores = policy.score(make_view(policy, keys=keys, values=keys, dtype=torch.float16))
    assert bool(scores.isfinite().all())
    assert float(scores.sum(-1).min()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (kvkeep.CurDKV, {"combine": "sum"}, "cur: combine 'sum' is none of ('kv_product', 'kv_average',"),
        (kvkeep.CurDKV, {"rank": -1}, "cur: rank -1 is negative."),
        (kvkeep.CurDKV, {"local_window": -2}, "cur: local_window -2 is negative."),
        (
            kvkeep.VaSEDKV,
            {"combine": "sum"},
            "vase-dkv: combine 'sum' is none of ('kv_product', 'kv_average',",
        ),
        (kvkeep.VaSEDKV, {"rank": 0}, "vase-dkv: rank 0 is below 1."),
    ],
)
def test_errors(kind: type[Policy], options: dict[str, Any], message: str) -> None:
    """A setting that cannot be right must be named, not run."""
    with pytest.raises(ConfigError) as error:
        kind(budget=24, buffer=8, **options)
    assert str(error.value).startswith(message)
