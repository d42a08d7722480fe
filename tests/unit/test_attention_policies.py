"""h2o, tova, snapkv and the window attention they stand on."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import kvkeep
from kvkeep.core.errors import BudgetError, ConfigError
from kvkeep.scoring.window_attention import window_attention
from kvkeep.testing.views import SHAPES, decide, kept, make_view
from tests.reference import h2o, tova
from tests.reference.heads import heads, keep_by_score
from tests.reference.window_attention import window_attention as reference_attention

GROUP_REDUCE = ("prob_mean", "logit_max", "logit_mean")


def close(scores: torch.Tensor, expected: list[list[list[float]]]) -> None:
    """Compare scores with a reference wherever an entry is stored."""
    for row, heads_of_row in enumerate(expected):
        for head, numbers in enumerate(heads_of_row):
            torch.testing.assert_close(
                scores[row, head, : len(numbers)].double(),
                torch.tensor(numbers).double(),
                atol=1e-6,
                rtol=1e-5,
            )


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
class TestSnapKV:
    """The score that half of the policies share."""

    @pytest.mark.parametrize("group_reduce", GROUP_REDUCE)
    @pytest.mark.parametrize(("pool", "kind"), [(5, "avg"), (7, "max"), (1, "avg")])
    def test_decisions(self, shape: dict[str, Any], group_reduce: Any, pool: int, kind: Any) -> None:
        """Other entries than the published rule keeps would stay."""
        policy = kvkeep.SnapKV(budget=24, buffer=8, pool=pool, pool_kind=kind, group_reduce=group_reduce)
        view = make_view(policy, **shape)
        options = {"pool": kind if pool > 1 else "none", "kernel": pool, "group_reduce": group_reduce}
        scores = [[reference_attention(h, h.older_than(8), **options) for h in row] for row in heads(view)]
        close(policy.score(view), scores)
        if kind == "avg":  # a maximum makes true ties, which float32 and float64 may split differently
            expected = [
                [keep_by_score(h, s, 24) for h, s in zip(*pair, strict=True)]
                for pair in zip(heads(view), scores, strict=True)
            ]
            assert kept(decide(policy, view)) == expected

    def test_a_window_shorter_than_the_buffer(self, shape: dict[str, Any]) -> None:
        """The window of the R-KV repository is 8 while evictions come every 128 tokens."""
        policy = kvkeep.SnapKV(budget=24, buffer=8, window=3)
        view = make_view(policy, **shape)
        assert policy.recent == 3
        assert view.queries.shape[2] == 3
        scores = [
            [reference_attention(h, h.older_than(3), pool="avg", kernel=5) for h in row]
            for row in heads(view)
        ]
        close(policy.score(view), scores)
        decide(policy, view)

    def test_queries_that_were_never_seen(self, shape: dict[str, Any]) -> None:
        """A prompt shorter than the window leaves empty query slots; they must not vote."""
        policy = kvkeep.SnapKV(budget=24, buffer=8)
        view = make_view(policy, **shape, queries_seen=[3] * len(shape["lengths"]))
        assert int((view.query_positions >= 0).sum()) == 3 * len(shape["lengths"])
        scores = [
            [reference_attention(h, h.older_than(8), pool="avg", kernel=5) for h in row]
            for row in heads(view)
        ]
        close(policy.score(view), scores)


class TestWindowAttentionByHand:
    """Numbers that can be checked on paper."""

    def call(self, logits: list[list[float]], **options: Any) -> list[float]:
        """Attention of queries whose logits to the entries are given, one KV head."""
        count = len(logits[0])
        keys = torch.eye(count)[None, None]  # logits are the queries themselves, times sqrt(dim)
        queries = torch.tensor(logits)[None, None] * math.sqrt(count)
        if options.pop("as_group", False):
            queries = queries.transpose(1, 2)
        times = torch.full((1, queries.shape[2]), 99)
        where = torch.arange(count)[None, None]
        among = options.pop("among", torch.ones(1, 1, count, dtype=torch.bool))
        return window_attention(queries, times, keys, where, among, **options)[0, 0].tolist()

    def test_one_query(self) -> None:
        """Logits 0 and log 3 are shares of a quarter and three quarters."""
        assert self.call([[0, math.log(3)]]) == pytest.approx([0.25, 0.75])

    def test_what_is_left_out_takes_no_share(self) -> None:
        """Entries outside the softmax must not lower the others."""
        among = torch.tensor([[[True, True, False]]])
        assert self.call([[0, math.log(3), 50.0]], among=among) == pytest.approx([0.25, 0.75, 0])

    def test_reductions_over_the_window(self) -> None:
        """Mean, sum and maximum over two opposite queries."""
        logits = [[0, math.log(3)], [math.log(3), 0]]
        assert self.call(logits) == pytest.approx([0.5, 0.5])
        assert self.call(logits, window_reduce="sum") == pytest.approx([1, 1])
        assert self.call(logits, window_reduce="max") == pytest.approx([0.75, 0.75])

    def test_reductions_over_the_group(self) -> None:
        """The maximum of logits is taken before the softmax, the mean of probabilities after it."""
        logits = [[0, math.log(3), 0], [math.log(5), 0, 0]]
        assert self.call(logits, as_group=True, group_reduce="logit_max") == pytest.approx(
            [5 / 9, 3 / 9, 1 / 9]
        )
        mean = self.call(logits, as_group=True, group_reduce="prob_mean")
        assert mean == pytest.approx([(1 / 5 + 5 / 7) / 2, (3 / 5 + 1 / 7) / 2, (1 / 5 + 1 / 7) / 2])

    def test_temperature(self) -> None:
        """Twice the temperature takes the square root of the odds."""
        assert self.call([[0, math.log(9)]], temperature=2.0) == pytest.approx([0.25, 0.75])

    def test_average_pool_counts_the_padding(self) -> None:
        """The divisor is always the width, so the ends are damped."""
        assert self.call([[0.0, 0, 0, 0]], pool="avg", kernel=3) == pytest.approx([1 / 6, 0.25, 0.25, 1 / 6])

    def test_max_pool(self) -> None:
        """An entry earns from its best neighbour."""
        assert self.call([[math.log(2), 0, 0, 0]], pool="max", kernel=3) == pytest.approx(
            [0.4, 0.4, 0.2, 0.2]
        )

    def test_skipping_the_last_slots_changes_nothing(self) -> None:
        """The shortcut for even rows must be only that."""
        among = torch.tensor([[[True, True, True, False, False]]])
        whole = self.call([[1.0, 2, 3, 4, 5]], among=among, pool="avg", kernel=3)
        assert self.call([[1.0, 2, 3, 4, 5]], among=among, pool="avg", kernel=3, stop=3) == whole

    def test_causal(self) -> None:
        """A query must not look at entries that came after it."""
        keys, queries = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 2, 8)
        where, among = torch.arange(4)[None, None], torch.ones(1, 1, 4, dtype=torch.bool)
        both = window_attention(queries, torch.tensor([[1, 2]]), keys, where, among, causal=True)
        assert both[0, 0, 3] == 0
        first = window_attention(queries[:, :, :1], torch.tensor([[1]]), keys, where, among, causal=True)
        assert first[0, 0, 2:].tolist() == [0, 0]
        assert float(first.sum()) == pytest.approx(1)

    def test_nothing_to_look_at(self) -> None:
        """A row without candidates must give zeros, not NaN."""
        assert self.call([[1.0, 2]], among=torch.zeros(1, 1, 2, dtype=torch.bool)) == [0, 0]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("average", [False, True])
def test_h2o(shape: dict[str, Any], average: bool) -> None:
    """Half recent, half heavy hitters: the wrong half would go."""
    policy = kvkeep.H2O(budget=24, buffer=8, average=average)
    view = make_view(policy, **shape)
    expected = [[h2o.kept(head, 24, 12, average) for head in row] for row in heads(view)]
    assert kept(decide(policy, view)) == expected


class TestH2OByHand:
    """Cases small enough to check on paper."""

    def test_heavy_hitters_and_newest(self) -> None:
        """Budget 4: the two newest, and the two largest sums before them."""
        policy = kvkeep.H2O(budget=4, buffer=1)
        sums = torch.tensor([[[0.5, 3.0, 0.1, 2.0, 9.0, 0.0, 0.0]]])
        view = make_view(policy, keys=torch.randn(1, 1, 7, 4), attention_sum=sums)
        assert kept(decide(policy, view)) == [[[1, 4, 5, 6]]]

    def test_average_takes_age_into_account(self) -> None:
        """A sum of 3 over 7 queries is less than a sum of 2 over 3."""
        policy = kvkeep.H2O(budget=3, buffer=1, recent_window=2, average=True)
        sums = torch.tensor([[[3.0, 0.5, 0.5, 0.5, 2.0, 0.0, 0.0]]])
        view = make_view(policy, keys=torch.randn(1, 1, 7, 4), attention_sum=sums)
        assert kept(decide(policy, view)) == [[[4, 5, 6]]]

    def test_recent_window(self) -> None:
        """The split: half the budget, never less than the buffer, or what is asked for."""
        assert kvkeep.H2O(budget=100, buffer=8).recent == 50
        assert kvkeep.H2O(budget=100, buffer=64).recent == 64
        assert kvkeep.H2O(budget=100, buffer=8, recent_window=20).recent == 20

    def test_a_ratio_is_split_once_it_is_a_count(self) -> None:
        """Building the policy must not need the length that the ratio refers to."""
        policy = kvkeep.H2O(budget=kvkeep.Budget.from_keep_ratio(0.25), buffer=8)
        assert policy.with_budget(policy.amount.resolve(context=400)).recent == 50

    def test_errors(self) -> None:
        """A split that cannot be is named."""
        with pytest.raises(ConfigError, match="h2o: recent_window 0 is below 1 token"):
            kvkeep.H2O(budget=24, buffer=8, recent_window=0)
        with pytest.raises(BudgetError, match=r"h2o: the 24 newest entries .* budget of 24"):
            kvkeep.H2O(budget=24, buffer=8, recent_window=24)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_tova(shape: dict[str, Any]) -> None:
    """One vote for the whole layer: heads that kept different entries would not be TOVA."""
    policy = kvkeep.TOVA(budget=24, buffer=8)
    view = make_view(policy, **shape)
    shared = view.positions[:, :1].expand_as(view.positions)  # TOVA itself keeps heads alike
    view = make_view(policy, **shape, positions=shared, seq_lens=view.seq_lens.tolist())
    layers = heads(view)
    scores = [[tova.score(row)] * len(row) for row in layers]
    close(policy.score(view), scores)
    expected = [
        [keep_by_score(h, s, 24) for h, s in zip(*pair, strict=True)]
        for pair in zip(layers, scores, strict=True)
    ]
    answer = kept(decide(policy, view))
    assert answer == expected
    assert all(head == row[0] for row in answer for head in row)


def test_tova_step_by_step() -> None:
    """With a buffer of one, just the least attended entry goes, and never the last."""
    policy = kvkeep.TOVA(budget=3, buffer=1)
    assert policy.recent == 1
    keys = torch.tensor([[2.0, 0], [1, 0], [3, 0], [-9, 0]])[None, None]
    view = make_view(
        policy, keys=keys, queries=torch.tensor([[[[1.0, 0]]]]), query_positions=torch.tensor([[3]])
    )
    assert kept(decide(policy, view)) == [[[0, 2, 3]]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "snapkv: window 0 is below 1 query."),
        ({"pool": 4}, "snapkv: pool 4 is not odd."),
        ({"pool_kind": "min"}, "snapkv: pool_kind 'min' is not 'avg' or 'max'."),
        ({"group_reduce": "median"}, "snapkv: group_reduce 'median' is none of"),
        ({"window": 24}, "snapkv: the 24 newest entries are always kept"),
    ],
)
def test_snapkv_errors(options: dict[str, Any], message: str) -> None:
    """A setting that cannot be right must be named, not run."""
    with pytest.raises(ConfigError) as error:
        kvkeep.SnapKV(budget=24, buffer=8, **options)
    assert str(error.value).startswith(message)
