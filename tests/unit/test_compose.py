"""Parts of different methods put together: what each of them promises must still hold."""

from __future__ import annotations

import pytest
import torch

import kvkeep
from kvkeep.core.errors import ConfigError
from kvkeep.testing.models import tiny_model, tokens
from kvkeep.testing.views import decide, kept, make_view
from kvkeep.testing.watching import feed

ONE_SET = ["tova", "tova + sample", "tova + reserve(slots=6)", "tova + sample + reserve(slots=6)"]


@pytest.mark.parametrize("text", ONE_SET)
def test_tova_keeps_one_set_in_all_heads_however_it_chooses(text: str) -> None:
    """Its score averages slots over heads: after draws per head, one slot would mean several tokens."""
    model = tiny_model("llama")
    policy = kvkeep.policy(text, budget=24, buffer=8)
    cache = kvkeep.RetentionCache(model, policy)
    ids = tokens(2, 80)
    feed(model, cache, ids, torch.ones_like(ids), [40, *[1] * 40])
    assert cache.trace.evictions >= 4
    for layer in range(2):
        for row in range(2):
            heads = [list(head) for head in cache.kept_positions(layer)[row]]
            assert heads[0] == heads[1]


def test_the_one_draw_of_tova_is_a_draw_by_its_score() -> None:
    """Shared noise must still be noise: every candidate is drawn about as often as its share says."""
    policy = kvkeep.policy("tova + sample", budget=9, buffer=8)
    rows = 2000
    one = make_view(policy, lengths=(13,), kv_heads=3)
    shares = policy.score(one)[0, 0, :5]  # one place, five candidates
    queries = one.recorded["queries"].expand(rows, -1, -1, -1)
    times = one.recorded["query_positions"].expand(rows, -1)
    keys = one.keys.expand(rows, -1, -1, -1)
    view = make_view(policy, keys=keys, queries=queries, query_positions=times)
    heads = decide(policy, view).indices
    assert torch.equal(heads, heads[:, :1].expand_as(heads))
    counts = torch.bincount(heads[:, 0, 0], minlength=5)
    assert torch.allclose(counts / rows, shares / shares.sum(), atol=0.04)


def test_the_reserve_of_one_set_asks_all_heads() -> None:
    """A reserve by the first head alone would let the large values of the others go."""
    policy = kvkeep.policy("tova + reserve(slots=2, magnitude=l2)", budget=12, buffer=8)
    values = torch.full((1, 2, 40, 8), 0.1)
    values[0, 0, 3], values[0, 1, 5], values[0, :, 7] = 4.0, 9.0, 3.0  # means of 2, 4.5 and 3
    for heads in kept(decide(policy, make_view(policy, lengths=(40,), values=values))):
        assert {5, 7} <= set(heads[0])
        assert heads[0] == heads[1]


@pytest.mark.parametrize("select_by", ["smallest", "random"])
def test_a_sample_of_a_control_is_refused(select_by: str) -> None:
    """Negated magnitudes are no shares, and a draw by random numbers with the same numbers is no draw."""
    with pytest.raises(ConfigError) as caught:
        kvkeep.policy(f"vase-attnv(select_by={select_by}) + sample", budget=1024)
    assert str(caught.value) == (
        f"vase-attnv + sample: select_by={select_by} is a control whose scores no sample can follow: leave "
        "'+ sample' or that option out."
    )
    assert kvkeep.policy(f"vase-attnv(select_by={select_by}) + reserve", budget=1024).bounded
    assert kvkeep.policy("vase-attnv + sample", budget=1024).traits.random
