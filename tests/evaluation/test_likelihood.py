"""Log-likelihood under a policy: equal to the plain model, to the oracle, and to decoding."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import kvkeep
from kvkeep.core.errors import ConfigError
from kvkeep.core.policy import Policy
from kvkeep.engine.attention import restore
from kvkeep.evaluation.likelihood import WindowScore, cut, read_windows
from kvkeep.evaluation.likelihood_summary import difference, summarise
from kvkeep.testing.models import tiny_model, tokens
from kvkeep.testing.oracle import replay
from kvkeep.testing.watching import WatchedCache, feed, pieces

POLICIES: dict[str, Policy] = {
    "vase-attnv": kvkeep.VaSEAttnV(budget=24, buffer=8, prefill="chunk"),
    "h2o": kvkeep.H2O(budget=24, buffer=8, prefill="chunk"),
    "random": kvkeep.RandomEviction(budget=24, buffer=8, prefill="chunk"),
    "r-kv": kvkeep.RKV(budget=24, buffer=8, prefill="chunk"),
}


def nats_of(logits: Tensor, windows: Tensor) -> list[float]:
    """Per window: sum of -log p of every token but the first, a loop over tokens."""
    logp = logits.double().log_softmax(-1)
    return [
        -sum(float(logp[row, place - 1, int(ids[place])]) for place in range(1, len(ids)))
        for row, ids in enumerate(windows)
    ]


@pytest.mark.parametrize("chunk", [8, 13, 60, 1])
def test_with_room_for_everything_it_is_the_plain_model(chunk: int) -> None:
    """Chunks, targets across their edges and the sum must add nothing and lose nothing."""
    model, windows = tiny_model("llama"), tokens(3, 60)
    with torch.no_grad():
        plain = nats_of(model(windows).logits, windows)
    policy = replace(POLICIES["vase-attnv"], budget=60)
    for tried in (policy, kvkeep.Full()):
        scores = read_windows(model, tried, windows, chunk=chunk)
        assert [sum(score.nats) for score in scores] == pytest.approx(plain, rel=1e-5)
        assert [sum(score.tokens) for score in scores] == [59] * 3
        assert scores[0].evictions == 0
        assert scores[0].full_at is None


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("chunk", [8, 5])
def test_under_a_budget_it_is_the_masked_oracle(policy: Policy, chunk: int) -> None:
    """A text would be predicted from entries that are gone, or not evicted at all."""
    model, windows = tiny_model("llama", dtype=torch.float64), tokens(2, 60)
    scores = read_windows(model, policy, windows, chunk=chunk)
    lengths, mask = pieces(60, chunk), torch.ones_like(windows)
    cache = WatchedCache(model, policy)
    feed(model, cache, windows, mask, lengths)
    restore(model)
    exact = nats_of(torch.cat(replay(model, cache.seen, windows, mask, lengths), 1), windows)
    assert [sum(score.nats) for score in scores] == pytest.approx(exact, rel=1e-9)
    assert scores[0].evictions >= 4
    full = [sum(score.nats) for score in read_windows(model, kvkeep.Full(), windows, chunk=chunk)]
    assert exact != pytest.approx(full, rel=1e-4)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_chunks_as_long_as_the_buffer_are_decoding(policy: Policy) -> None:
    """What is reported for reading would say nothing about writing."""
    model, windows = tiny_model("llama", dtype=torch.float64), tokens(2, 72)
    chunks = read_windows(model, policy, windows, chunk=8)
    steps = read_windows(model, policy, windows, chunk=1)
    assert chunks[1].evictions == steps[1].evictions == 6  # the last one falls behind the last token
    for one, two in zip(chunks, steps, strict=True):
        by_eights = [sum(two.nats[start : start + 8]) for start in range(0, 72, 8)]
        assert list(one.nats) == pytest.approx(by_eights, rel=1e-9)
    assert summarise(chunks).mean_cache == pytest.approx(summarise(steps).mean_cache)


def test_surprise_is_read_token_by_token() -> None:
    """In chunks it would evict on the clock, under the name of another rule."""
    model, windows = tiny_model(), tokens(1, 48)
    policy = kvkeep.policy("snapkv(window=4) + surprise", budget=24, buffer=8, prefill="chunk")
    with pytest.raises(ConfigError, match="chunk=1"):
        read_windows(model, policy, windows, chunk=8)
    assert read_windows(model, policy, windows, chunk=1)[0].evictions > 0


def test_a_window_does_not_depend_on_its_neighbours() -> None:
    """A batch would give other figures than its windows alone."""
    model, windows = tiny_model("llama", dtype=torch.float64), tokens(3, 48)
    policy = POLICIES["random"]
    together = read_windows(model, policy, windows, chunk=8, seed=3)
    alone = read_windows(model, policy, windows[2:], chunk=8, seed=3, names=[2])[0]
    assert alone.nats == pytest.approx(together[2].nats, rel=1e-9)
    other = read_windows(model, policy, windows[2:], chunk=8, seed=4, names=[2])[0]
    assert other.nats != pytest.approx(alone.nats, rel=1e-6)


def test_the_figures_are_measured() -> None:
    """Mean and peak would repeat the request instead of what was held."""
    model, windows = tiny_model("llama"), tokens(2, 64)
    policy = POLICIES["vase-attnv"]
    scores = read_windows(model, policy, windows, chunk=8)
    seen = [place if place <= 32 else 24 + 1 + (place - 1) % 8 for place in range(1, 64)]
    found = summarise(scores)
    assert found.mean_cache == pytest.approx(sum(seen) / len(seen))
    assert found.peak_cache == 32
    assert scores[0].full_at == 4
    assert found.before is not None
    assert found.after is not None
    assert (found.before.tokens, found.after.tokens) == (64, 62)
    assert found.perplexity == pytest.approx(math.exp(found.all_tokens.nats))


def score(name: int, *nats: float) -> WindowScore:
    """Chunks of ten tokens."""
    return WindowScore(
        name=name,
        nats=nats,
        tokens=(10,) * len(nats),
        entries=(5.0,) * len(nats),
        peak=9,
        full_at=1,
        evictions=1,
    )


def test_a_difference_is_paired_by_window() -> None:
    """The spread between texts would drown what a policy costs."""
    full = [score(0, 20.0, 10.0), score(1, 40.0, 30.0)]
    other = [score(0, 20.0, 12.0), score(1, 40.0, 34.0)]
    whole, after = difference(full, other), difference(full, other, start=1)
    assert (whole.nats, after.nats) == (pytest.approx(0.15), pytest.approx(0.3))
    # Student's t with one degree of freedom: 12.706 times the standard error of (0.2, 0.4).
    assert after.interval == pytest.approx((0.3 - 12.7062 * 0.1, 0.3 + 12.7062 * 0.1), rel=1e-4)
    with pytest.raises(ConfigError, match="same windows"):
        difference(full, other[:1])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"policy": kvkeep.VaSEAttnV(budget=24, buffer=8)}, "prefill='chunk'"),
        (
            {
                "policy": kvkeep.VaSEAttnV(
                    budget=kvkeep.Budget(entries=24, prompt="kept"), buffer=8, prefill="chunk"
                )
            },
            "prompt='counts'",
        ),
        ({"windows": tokens(1, 513)}, "512 positions"),
        ({"chunk": 0}, "at least 1"),
    ],
)
def test_settings_that_would_mislead_are_refused(change: dict[str, object], sentence: str) -> None:
    """A cache that silently keeps everything would look like a very good policy."""
    given = {"policy": POLICIES["h2o"], "windows": tokens(1, 40), "chunk": 8} | change
    with pytest.raises(ConfigError, match=sentence):
        read_windows(tiny_model("llama"), **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(("length", "window", "limit"), [(7, 8, None), (20, 1, None), (20, 8, 0)])
def test_texts_that_hold_no_window_are_refused(length: int, window: int, limit: int | None) -> None:
    """An average over nothing would be printed as a number."""
    with pytest.raises(ConfigError, match=r"at least|shorter"):
        cut(list(range(length)), window, limit)
