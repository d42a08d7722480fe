"""TriAttention: the score against the five steps of its definition, the modes, the protection."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from kvkeep.core.budget import Budget
from kvkeep.core.errors import BudgetError, ConfigError, ScoreError
from kvkeep.core.view import LayerView, Rope
from kvkeep.policies.compose import policy
from kvkeep.policies.triattention import TriAttention
from kvkeep.scoring.trigonometric import pair_channels, trigonometric, unpair_channels
from kvkeep.testing.views import decide, kept, make_counts, make_view, row_of
from tests.calibrated import HEAD_DIM, Layer, make_layers, make_rope
from tests.reference.trigonometric import best, key_score, standardized, union_choice


def rotate(vectors: Tensor, positions: Tensor, rope: Rope) -> Tensor:
    """Rotary embedding in float64, channel by channel."""
    first, second = pair_channels(vectors.double(), rope.rotary_dim)
    angles = torch.zeros(*positions.shape, first.shape[-1], dtype=torch.float64)
    angles[..., : rope.rotary_dim // 2] = positions[..., None] * rope.inv_freq.double()
    scale = torch.ones(first.shape[-1], dtype=torch.float64)
    scale[: rope.rotary_dim // 2] = rope.scaling
    turned = torch.complex(first, second) * torch.polar(scale.expand_as(angles), angles)
    return unpair_channels(turned.real, turned.imag, rope.rotary_dim)


def naive(view: LayerView, row: int, head: int, entry: int, **options: object) -> float:
    layer = view.calibration
    group = layer.mean.shape[0] // view.keys.shape[1]
    return key_score(
        view.keys[row, head // group, entry].tolist(),
        int(view.positions[row, head // group, entry]),
        int(view.seq_lens[row]),
        layer.mean[head].tolist(),
        layer.magnitude[head].tolist(),
        view.rope.inv_freq.tolist(),
        view.rope.scaling,
        **options,
    )


@pytest.mark.parametrize(
    ("rotary_dim", "scaling"),
    [(8, 1.0), (8, 1.3), (4, 1.0), (4, 1.3)],
    ids=["plain", "yarn", "partial", "both"],
)
@pytest.mark.parametrize("reduce", ["mean", "max"])
def test_closed_form_equals_the_loop_over_offsets(rotary_dim: int, scaling: float, reduce: str) -> None:
    """The score would not be the paper's: every kept set would be another method's."""
    policy = TriAttention(budget=20, offset_reduce=reduce)
    view = make_layers(policy, layers=1, lengths=(7,), evicted=50)[0]
    view.recorded["rope"] = make_rope(rotary_dim, scaling)
    scores = trigonometric(
        view.keys, view.seq_lens, view.calibration, view.rope, offset_reduce=policy.offset_reduce
    )
    chosen = {} if reduce == "mean" else {"reduce": max}
    expected = [[naive(view, 0, head, entry, **chosen) for entry in range(7)] for head in range(4)]
    torch.testing.assert_close(scores[0].double(), torch.tensor(expected).double(), atol=1e-4, rtol=1e-5)


def test_long_sequences_keep_their_phase() -> None:
    """Angles of 1e5 radians in float32 would be off by a hundredth of a turn on every key."""
    view = make_layers(TriAttention(budget=20), layers=1, lengths=(5,), seq_lens=[98_765], evicted=0)[0]
    positions = torch.tensor([3, 40_000, 65_537, 90_001, 98_764]).expand_as(view.positions)
    view = dataclasses.replace(view, positions=positions)
    scores = trigonometric(view.keys, view.seq_lens, view.calibration, view.rope)
    expected = [[naive(view, 0, head, entry) for entry in range(5)] for head in range(4)]
    torch.testing.assert_close(scores[0].double(), torch.tensor(expected).double(), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"use_direction": False}, "norm"),
        ({"use_concentration": False}, "plain"),
        ({"offset_max": 1}, "one"),
        ({"offset_max": 100}, "seven"),
    ],
)
def test_switches(options: dict[str, object], names: str) -> None:
    """An ablation would measure something else than its name."""
    view = make_layers(TriAttention(budget=20), layers=1, lengths=(5,), evicted=3)[0]
    scores = trigonometric(view.keys, view.seq_lens, view.calibration, view.rope, **options)
    expected = [[naive(view, 0, head, entry, **options) for entry in range(5)] for head in range(4)]
    torch.testing.assert_close(scores[0].double(), torch.tensor(expected).double(), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(("rotary_dim", "scaling"), [(8, 1.0), (8, 1.2), (4, 1.2)])
def test_constant_queries_give_the_exact_logit(rotary_dim: int, scaling: float) -> None:
    """A head with one query would be mispredicted: the formula, the pairing or the scaling is wrong."""
    rope = make_rope(rotary_dim, scaling)
    query, keys = torch.randn(HEAD_DIM), torch.randn(6, HEAD_DIM)
    positions, now = torch.tensor([0, 2, 3, 11, 17, 29]), 30
    pairs = torch.complex(*pair_channels(query, rotary_dim))[None]
    stored = rotate(keys, positions, rope).float()
    scores = trigonometric(
        stored[None, None], torch.tensor([now]), Layer(pairs, pairs.abs()), rope, offset_max=1
    )
    ahead = rotate(query[None], torch.tensor([now + 1]), rope)
    torch.testing.assert_close(scores[0, 0].double(), stored.double() @ ahead[0], atol=1e-5, rtol=1e-5)


def test_scattered_queries_ignore_positions() -> None:
    """With no mean direction the score is the expected query length times the key length, whatever t."""
    view = make_layers(TriAttention(budget=20), layers=1, lengths=(6,))[0]
    layer = view.calibration
    layer.mean = torch.zeros_like(layer.mean)
    scores = trigonometric(view.keys, view.seq_lens, layer, view.rope)
    later = trigonometric(view.keys, view.seq_lens + 777, layer, view.rope)
    real, imaginary = pair_channels(view.keys, HEAD_DIM)
    expected = torch.hypot(real, imaginary).repeat_interleave(2, 1) @ layer.magnitude[None, :, :, None]
    assert torch.equal(scores, later)
    torch.testing.assert_close(scores, expected[..., 0])


def z_scores(view: LayerView, row: int) -> tuple[list[list[float]], list[list[int]]]:
    """Standardised naive scores per query head, and which entries they are for."""
    heads = view.calibration.mean.shape[0]
    group = heads // view.keys.shape[1]
    entries = [view.candidates[row, head // group].nonzero()[:, 0].tolist() for head in range(heads)]
    return [standardized([naive(view, row, h, i) for i in entries[h]]) for h in range(heads)], entries


@pytest.mark.parametrize("mode", ["union", "per-head", "per-layer-per-head"])
@pytest.mark.parametrize("protect_prompt", [True, False])
def test_modes_keep_what_their_rule_says(mode: str, protect_prompt: bool) -> None:
    """The mode named in a table would not be the one that was run."""
    policy = TriAttention(budget=24, mode=mode, protect_prompt=protect_prompt, recent=2)
    # In union mode earlier decisions were shared by the heads too: give them equal positions.
    one = torch.arange(40).expand(2, 2, -1)
    views = make_layers(policy, positions=one, evicted=0, prompt_lens=[6, 4])
    decisions = policy.decide(views, [make_counts(view) for view in views])
    for row in range(2):
        z = [z_scores(view, row)[0] for view in views]
        entries = z_scores(views[0], row)[1]
        count = 24 - int(views[0].protected[row, 0].sum())
        for layer, decision in enumerate(decisions):
            for head in range(2):
                own = z[layer][2 * head : 2 * head + 2]
                if mode == "union":
                    chosen = union_choice([each for heads in z for each in heads], count)
                elif mode == "per-head":
                    groups = [heads[2 * head : 2 * head + 2] for heads in z]
                    places = range(len(own[0]))
                    chosen = best([sum(max(g[0][i], g[1][i]) for g in groups) for i in places], count)
                else:
                    chosen = best([max(pair) for pair in zip(*own, strict=True)], count)
                expected = {entries[2 * head][i] for i in chosen}
                expected |= set(views[layer].protected[row, head].nonzero()[:, 0].tolist())
                assert set(kept(decision)[row][head]) == expected


def test_shared_modes_decide_once_for_all_layers() -> None:
    """Slot i would hold another token in another layer, and the next mean over layers would be nonsense."""
    policy = TriAttention(budget=24)
    views = make_layers(policy, layers=3)
    first, *others = policy.decide(views, [make_counts(view) for view in views])
    for decision in others:
        assert kept(decision) == kept(first)


def test_rows_decide_alone() -> None:
    """A sequence would keep other entries in a batch than alone."""
    policy = TriAttention(budget=24)
    views = make_layers(policy)
    together = policy.decide(views, [make_counts(view) for view in views])
    for row in range(2):
        alone = [make_view(policy, **row_of(view, row)) for view in views]
        decisions = policy.decide(alone, [make_counts(view) for view in alone])
        for whole, single in zip(together, decisions, strict=True):
            assert kept(whole)[row] == kept(single)[0]


def test_ties_are_broken_by_the_sequence_alone() -> None:
    """Equal keys would be kept by storage order: always the oldest, or by batch neighbours."""
    policy = TriAttention(budget=20, protect_prompt=False)
    keys = torch.ones(1, 2, 40, HEAD_DIM)
    view = make_layers(policy, layers=1, lengths=(40,), keys=keys, evicted=0)[0]
    other = make_layers(policy, layers=1, lengths=(40,), keys=keys, evicted=0, run_seed=1)[0]
    assert kept(decide(policy, view)) == kept(decide(policy, view))
    assert kept(decide(policy, view)) != kept(decide(policy, other))
    assert kept(decide(policy, view))[0][0] != list(range(20))


def test_the_noise_decides_nothing_but_ties() -> None:
    """Noise large enough to reorder real scores would make the method random."""
    policy = TriAttention(budget=20, mode="per-layer-per-head")
    view = make_layers(policy, layers=1)[0]
    noisy = policy.score(view)
    view.recorded["random"] = make_layers(policy, layers=1, run_seed=5)[0].random
    difference = (noisy - policy.score(view)).abs()
    assert 0 < float(difference[view.candidates].max()) < 2e-6


def test_group_mean() -> None:
    """The option would be ignored."""
    options = {"budget": 20, "mode": "per-layer-per-head", "normalize": False}
    policy = TriAttention(**options, group_reduce="mean")
    view = make_layers(policy, layers=1)[0]
    raw = trigonometric(view.keys, view.seq_lens, view.calibration, view.rope).unflatten(1, (2, 2))
    torch.testing.assert_close(policy.score(view), raw.mean(2), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(TriAttention(**options).score(view), raw.amax(2), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mode", ["union", "per-head", "per-layer-per-head"])
def test_nan_names_the_layer(mode: str) -> None:
    """A broken layer would be hidden in a mean, or blamed on layer 0."""
    policy = TriAttention(budget=24, mode=mode)
    views = make_layers(policy)
    place = views[1].candidates.nonzero()[0]
    views[1].keys[place[0], place[1], place[2]] = float("nan")
    with pytest.raises(ScoreError, match="triattention returned NaN for an entry of layer 1"):
        policy.decide(views, [make_counts(view) for view in views])


def test_protection_and_defaults() -> None:
    """Defaults would not be those of the official command line."""
    policy = TriAttention(budget=2048)
    assert policy.protects_prompt
    assert (policy.recent, policy.buffer, policy.sinks) == (0, 128, 0)
    assert policy.traits.trigger.decode == "slack"
    assert not TriAttention(budget=20, protect_prompt=False).protects_prompt
    assert TriAttention(budget=Budget(entries=20, prompt="kept"), protect_prompt=False).protects_prompt
    assert TriAttention(**policy.options()) == policy


@pytest.mark.parametrize("parts", ["sample", "reserve", "sample + reserve(slots=4)"])
def test_compositions_let_each_layer_decide(parts: str) -> None:
    """A draw keeps other tokens in each layer: a mean over layers of slot i would mix up tokens."""
    composed = policy(f"triattention(protect_prompt=false) + {parts}", budget=24)
    assert composed.traits.scope == "layer"
    views = make_layers(composed.base)
    alone = TriAttention(budget=24, protect_prompt=False, mode="per-layer-per-head")
    for scores, view in zip(composed.score_all(views), views, strict=True):
        assert torch.equal(scores, alone.score(view))
    assert policy("triattention + top-k", budget=24).traits.scope == "model"


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "per_head"},
        {"offset_reduce": "sum"},
        {"group_reduce": "sum"},
        {"offset_max": 0},
        {"offset_max": 1.5},
        {"recent": -1},
    ],
)
def test_bad_options_are_refused(options: dict[str, object]) -> None:
    """A typo would silently run another method."""
    with pytest.raises(ConfigError, match=next(iter(options))):
        TriAttention(budget=20, **options)


def test_recent_window_must_fit() -> None:
    """Nothing would be left to choose."""
    with pytest.raises(BudgetError, match="newest"):
        TriAttention(budget=20, recent=20)
