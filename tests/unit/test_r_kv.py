"""r-kv and its redundancy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvkeep
from kvkeep.core.errors import ConfigError
from kvkeep.scoring import redundancy as module
from kvkeep.scoring.redundancy import inverse_lengths, newest_duplicate, redundancy
from kvkeep.testing.views import SHAPES, decide, kept, make_view
from tests.reference import r_kv
from tests.reference.heads import heads, keep_by_score


def crowded(shape: dict[str, Any], spread: float) -> torch.Tensor:
    """Keys around one common direction: at small ``spread`` most pairs are duplicates."""
    lengths, dim = shape["lengths"], shape.get("head_dim", 8)
    source = torch.Generator().manual_seed(1)
    common = torch.randn(len(lengths), shape.get("kv_heads", 2), 1, dim, generator=source)
    own = torch.randn(*common.shape[:2], max(lengths), dim, generator=source)
    return common + spread * own


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("variant", ["original", "vase"])
@pytest.mark.parametrize("spread", [0.4, 1.0, 10.0])
@pytest.mark.parametrize("steps", [(2, 5), (16, 256)], ids=["many steps", "one step"])
def test_against_the_reference(
    shape: dict[str, Any],
    variant: Any,
    spread: float,
    steps: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The linear row sums and the backward walk must be the plain double loop, however keys crowd."""
    monkeypatch.setattr(module, "_FIRST_STEP", steps[0])
    monkeypatch.setattr(module, "_LARGEST_STEP", steps[1])
    policy = kvkeep.RKV(budget=24, buffer=8, variant=variant)
    view = make_view(policy, **shape | {"keys": crowded(shape, spread)})
    window, lam = (8, 0.1) if variant == "original" else (8, 0.5)
    scores = [[r_kv.score(h, variant=variant, window=window, lam=lam) for h in row] for row in heads(view)]
    mine = policy.score(view)
    for row, numbers in enumerate(scores):
        for head, expected in enumerate(numbers):
            size = len(expected)
            torch.testing.assert_close(
                mine[row, head, : size - window],
                torch.tensor(expected[: size - window]),
                atol=1e-6,
                rtol=1e-5,
            )
    answer, counted = kept(decide(policy, view)), 0
    for row, parts in enumerate(heads(view)):
        for number, head in enumerate(parts):
            expected = keep_by_score(head, scores[row][number], 24)
            # Max-pooling ties neighbours up to rounding; a disputed entry must score like the last one in.
            worst = min(scores[row][number][i] for i in expected if not head.protected[i])
            disputed = set(expected) ^ set(answer[row][number])
            assert all(abs(scores[row][number][i] - worst) < 1e-6 for i in disputed)
            counted += 1
    assert counted


class TestByHand:
    """Cases small enough to check on paper."""

    def test_newest_duplicate(self) -> None:
        """Four copies and a stranger: each copy's newest other copy, and none for the stranger."""
        keys = torch.tensor([[3.0, 0], [1, 0], [0, 1], [1, 0.5], [2, 0]])[None, None]
        inverse = inverse_lengths(keys, torch.ones(1, 1, 5, dtype=torch.bool))
        newest, cosine = newest_duplicate(keys, inverse, 0.5)
        assert newest.tolist() == [[[4, 4, -1, 4, 3]]]
        assert cosine[0, 0].tolist() == pytest.approx([1, 1, 0, 0.8**0.5, 0.8**0.5])

    def test_empty_slots_are_nobodys_duplicate(self) -> None:
        """Rubbish behind a short row must neither be found nor keep the walk going."""
        keys = torch.ones(1, 1, 5, 2)
        inverse = inverse_lengths(keys, torch.tensor([[[True, True, True, False, False]]]))
        assert newest_duplicate(keys, inverse, 0.5)[0].tolist() == [[[2, 2, 1, -1, -1]]]

    def test_mean_similarity(self) -> None:
        """Keys east, east, north: mean cosines 1/3, 1/3, 0 over three rows."""
        keys = torch.tensor([[2.0, 0], [1, 0], [0, 5]])[None, None]
        among = torch.ones(1, 1, 3, dtype=torch.bool)
        expected = torch.tensor([1 / 3, 1 / 3, 0.0]).softmax(-1)
        torch.testing.assert_close(redundancy(keys, among)[0, 0], expected)

    def test_the_newest_copy_is_let_off(self) -> None:
        """Keys east, east, north: each eastern key lets the other off, the northern lets entry 0 off."""
        keys = torch.tensor([[2.0, 0], [1, 0], [0, 5]])[None, None]
        among = torch.ones(1, 1, 3, dtype=torch.bool)
        torch.testing.assert_close(redundancy(keys, among, threshold=0.5)[0, 0], torch.full((3,), 1 / 3))

    def test_count_ignores_empty_slots(self) -> None:
        """A mean over slots instead of entries would make long neighbours change a row's decision."""
        keys = torch.randn(1, 1, 6, 4)
        alone = redundancy(keys[:, :, :4], torch.ones(1, 1, 4, dtype=torch.bool), threshold=0.5)
        among = torch.tensor([[[True] * 4 + [False] * 2]])
        padded = redundancy(keys, among, threshold=0.5)
        torch.testing.assert_close(padded[..., :4], alone)
        assert padded[0, 0, 4:].tolist() == [0, 0]

    def test_copies_go_first(self) -> None:
        """Without attention, what repeats the others leaves, and what stands alone stays."""
        keys = torch.tensor([[1.0, 0.01], [0, 1], [1, 0.0], [1, 0.02], [1, 0.03], [-1, 0]])[None, None]
        policy = kvkeep.RKV(budget=3, buffer=1, variant="vase", lam=0.0)
        assert kept(decide(policy, make_view(policy, keys=keys))) == [[[1, 2, 5]]]

    def test_only_attention(self) -> None:
        """lam=1 leaves SnapKV."""
        for variant, same in (
            ("vase", {}),
            ("original", {"window": 8, "pool": 7, "pool_kind": "max", "group_reduce": "logit_max"}),
        ):
            policy = kvkeep.RKV(budget=24, buffer=8, variant=variant, lam=1.0)
            snapkv = kvkeep.SnapKV(budget=24, buffer=8, **same)
            view = make_view(policy, lengths=(40, 31), group=3)
            assert kept(decide(policy, view)) == kept(
                decide(snapkv, make_view(snapkv, lengths=(40, 31), group=3))
            )


def test_more_entries_than_sixteen_bits_count() -> None:
    """A prompt of 40,000 tokens would wrap the place of the newest duplicate."""
    keys = torch.zeros(1, 1, 40_000, 2)
    keys[..., 0] = 1
    newest = newest_duplicate(keys, torch.ones(1, 1, 40_000), 0.5)[0][0, 0]
    assert newest[:-1].eq(39_999).all()
    assert newest[-1] == 39_998


def test_defaults_of_the_variants() -> None:
    """The published settings, by one word."""
    original, vase = kvkeep.RKV(budget=1024), kvkeep.RKV(budget=1024, variant="vase")
    assert (original.recent, original.traits.queries, original.buffer) == (8, 8, 64)
    assert (vase.recent, vase.traits.queries, vase.buffer) == (64, 64, 64)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variant": "new"}, "r-kv: variant 'new' is none of ('original', 'vase')."),
        ({"window": 0}, "r-kv: window 0 is below 1 query."),
        ({"lam": 1.5}, "r-kv: lam 1.5 is outside [0, 1]."),
        ({"threshold": -0.1}, "r-kv: threshold -0.1 is outside [0, 1]."),
        ({"window": 24}, "r-kv: the 24 newest entries are always kept"),
    ],
)
def test_errors(options: dict[str, Any], message: str) -> None:
    """A setting that cannot be right must be named, not run."""
    with pytest.raises(ConfigError) as error:
        kvkeep.RKV(budget=24, buffer=8, **options)
    assert str(error.value).startswith(message)
