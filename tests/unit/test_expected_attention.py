"""Expected attention: the moments that the engine records, and the score that is made of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from kvkeep.core.errors import ConfigError
from kvkeep.core.view import LayerView, QueryMoments, Rope
from kvkeep.engine.recording import MomentSums
from kvkeep.policies.expected_attention import ExpectedAttention
from kvkeep.testing.views import decide, kept, make_view, row_of
from tests.calibrated import HEAD_DIM, make_rope
from tests.reference.expected_attention import moments, rotation, shares


def rotated(queries: Tensor, positions: Tensor, rope: Rope) -> Tensor:
    """Rotate queries ``[batch, heads, new, dim]`` at positions ``[batch, new]``, one by one."""
    turned = queries.double().clone()
    for row, times in enumerate(positions.tolist()):
        for column, time in enumerate(times):
            matrix = rotation(time, rope.inv_freq.tolist(), rope.scaling, queries.shape[-1])
            turned[row, :, column] = turned[row, :, column] @ torch.from_numpy(matrix).T
    return turned.float()


@pytest.mark.parametrize(("rotary_dim", "scaling"), [(8, 1.0), (8, 1.3), (4, 1.3)])
@pytest.mark.parametrize("offset", [0.0, 300.0], ids=["centred", "far from zero"])
def test_recorded_moments(rotary_dim: int, scaling: float, offset: float) -> None:
    """Padding, attention sinks or a large query bias (Qwen2) would enter the covariance."""
    torch.manual_seed(0)
    rope = make_rope(rotary_dim, scaling)
    plain = torch.randn(2, 3, 40, HEAD_DIM) + offset * torch.randn(1, 3, 1, HEAD_DIM)
    padding = torch.tensor([[0], [11]])
    positions = (torch.arange(40) - padding).clamp(min=-1)
    queries = rotated(plain, positions, rope)
    queries[1, :, :11] = float("nan")  # what a padding column holds is nobody's business
    sums = MomentSums(queries, rope)
    for part in (slice(0, 1), slice(1, 25), slice(25, 40)):  # a prompt may come in chunks
        sums.add(queries[:, :, part], positions[:, part])
    recorded = sums.moments()
    for row, first in enumerate((4, 15)):
        for head in range(3):
            mean, covariance = moments([each.double().numpy() for each in plain[row, head, first:]])
            np.testing.assert_allclose(recorded.mean[row, head], mean, rtol=1e-4, atol=1e-4)
            # float32 queries of size 300 are themselves known to 3e-5 only.
            np.testing.assert_allclose(recorded.covariance[row, head], covariance, rtol=2e-3, atol=2e-3)


def test_moments_follow_the_rows() -> None:
    """After a beam switch a sequence would be scored by another one's queries."""
    torch.manual_seed(0)
    queries, positions = torch.randn(2, 2, 9, HEAD_DIM), torch.arange(9).expand(2, -1)
    sums, swapped = MomentSums(queries, make_rope()), MomentSums(queries, make_rope())
    for each in (sums, swapped):
        each.add(queries, positions)
    swapped.select_rows(torch.tensor([1, 0, 1]))
    for name in ("mean", "covariance"):
        expected = getattr(sums.moments(), name)[[1, 0, 1]]
        torch.testing.assert_close(getattr(swapped.moments(), name), expected)


def make_moments(batch: int, heads: int, seed: int = 0) -> QueryMoments:
    source = torch.Generator().manual_seed(seed)
    factor = torch.randn(batch, heads, HEAD_DIM, HEAD_DIM, generator=source)
    mean = torch.randn(batch, heads, HEAD_DIM, generator=source)
    return QueryMoments(mean, factor @ factor.transpose(-1, -2) / HEAD_DIM)


def moment_view(policy: ExpectedAttention, rope: Rope | None = None) -> LayerView:
    return make_view(
        policy,
        lengths=(40, 33),
        evicted=9,
        kv_heads=2,
        head_dim=HEAD_DIM,
        rope=rope or make_rope(),
        query_moments=make_moments(2, 4),
    )


@pytest.mark.parametrize(("rotary_dim", "scaling"), [(8, 1.0), (4, 1.3)])
@pytest.mark.parametrize(
    "options", [{}, {"use_covariance": False}, {"use_value_norm": False}, {"horizon": 7}, {"epsilon": 0.1}]
)
def test_score_equals_the_reference(rotary_dim: int, scaling: float, options: dict[str, object]) -> None:
    """The kept set would be another method's."""
    policy = ExpectedAttention(budget=20, buffer=6, **options)
    view = moment_view(policy, make_rope(rotary_dim, scaling))
    scores = policy.score(view)
    for row in range(2):
        for head in range(2):
            entries = (view.valid[row, head] & (view.positions[row, head] >= 4)).nonzero()[:, 0].tolist()
            heads = [
                (
                    view.query_moments.mean[row, h].double().numpy(),
                    view.query_moments.covariance[row, h].double().numpy(),
                )
                for h in (2 * head, 2 * head + 1)
            ]
            expected = shares(
                [view.keys[row, head, entry].double().numpy() for entry in entries],
                heads,
                int(view.seq_lens[row]),
                view.rope.inv_freq.tolist(),
                scaling,
                policy.horizon,
                policy.use_covariance,
            )
            lengths = view.values[row, head, entries].norm(dim=-1) if policy.use_value_norm else torch.ones(1)
            wanted = (torch.tensor(expected) + policy.epsilon) * lengths
            torch.testing.assert_close(scores[row, head, entries], wanted.float(), atol=1e-6, rtol=1e-4)


def test_decision_is_protected_and_alone() -> None:
    """Sinks or newest entries would be lost, or a row would keep others in a batch than alone."""
    policy = ExpectedAttention(budget=20, buffer=6)
    view = moment_view(policy)
    together = kept(decide(policy, view))
    for row in range(2):
        recorded = view.query_moments
        alone = row_of(view, row) | {
            "query_moments": QueryMoments(recorded.mean[row : row + 1], recorded.covariance[row : row + 1])
        }
        assert kept(decide(policy, make_view(policy, **alone)))[0] == together[row]


def test_a_prompt_of_sinks_only_ranks_by_value_length() -> None:
    """Without any recorded query the score would be NaN, and the generation would stop."""
    policy = ExpectedAttention(budget=20, buffer=6)
    sums = MomentSums(torch.zeros(2, 4, 3, HEAD_DIM), make_rope())
    sums.add(torch.randn(2, 4, 3, HEAD_DIM), torch.arange(3).expand(2, -1))
    view = moment_view(policy)
    view.recorded["query_moments"] = sums.moments()
    among = view.valid[0, 0] & (view.positions[0, 0] >= 4)
    scores, lengths = policy.score(view)[0, 0][among], view.values[0, 0].norm(dim=-1)[among]
    torch.testing.assert_close(scores / scores.sum(), lengths / lengths.sum())


@pytest.mark.parametrize("options", [{"horizon": 0}, {"epsilon": -1.0}])
def test_bad_options_are_refused(options: dict[str, object]) -> None:
    """A typo would silently run another method."""
    with pytest.raises(ConfigError, match=next(iter(options))):
        ExpectedAttention(budget=100, **options)
