"""What a policy may look at."""

from __future__ import annotations

import pytest
import torch

import kvkeep
from kvkeep.core.errors import ConfigError
from kvkeep.core.view import Rope, protected_mask
from kvkeep.testing.views import make_view

FIELDS = {
    "queries": "queries",
    "query_positions": "queries",
    "attention_sum": "attention_sum",
    "last_attended": "recurrence",
    "longest_pause": "recurrence",
    "query_moments": "query_moments",
    "log_retention": "log_retention",
    "calibration": "calibration",
    "rope": "rope",
    "random": "random",
}


@pytest.mark.parametrize("name", FIELDS)
def test_what_is_not_declared_cannot_be_read(name: str) -> None:
    """Otherwise a policy would work in one test and find nothing recorded in the next run."""
    view = make_view(kvkeep.KeyNorm(budget=24, buffer=8))
    with pytest.raises(ConfigError) as error:
        getattr(view, name)
    assert str(error.value) == (
        f"the policy reads view.{name} but its traits do not declare {FIELDS[name]!r}, so it was not "
        "recorded: declare it in the policy's traits."
    )


def test_candidates_are_stored_and_free() -> None:
    """Neither empty slots nor protected entries compete."""
    view = make_view(kvkeep.StreamingLLM(budget=24, buffer=8), lengths=(40, 30))
    assert view.candidates[0].sum(-1).tolist() == [28, 28]
    assert view.candidates[1].sum(-1).tolist() == [18, 18]
    assert not view.candidates[1, :, 30:].any()


def test_recent_goes_by_position() -> None:
    """After evictions the newest tokens are few positions, wherever they are stored."""
    view = make_view(kvkeep.KeyNorm(budget=24, buffer=8), lengths=(40, 30), evicted=50)
    assert view.recent(8).sum(-1).tolist() == [[8, 8], [8, 8]]
    assert view.recent(8)[1, 0].nonzero().flatten().tolist() == list(range(22, 30))
    assert not view.recent(0).any()


def test_protected_mask_by_hand() -> None:
    """Sinks, newest and prompt are positions; an empty slot is never protected."""
    positions = torch.tensor([[[0, 1, 5, 6, 9, 3]]])
    valid = torch.tensor([[[True] * 5 + [False]]])
    seq_lens = torch.tensor([10])

    def mask(sinks: int, recent: int, prompt: int | None) -> list[bool]:
        prompts = None if prompt is None else torch.tensor([prompt])
        return protected_mask(
            positions=positions,
            valid=valid,
            seq_lens=seq_lens,
            sinks=sinks,
            recent=recent,
            prompt_lens=prompts,
        )[0, 0].tolist()

    assert mask(0, 0, None) == [False] * 6
    assert mask(1, 0, None) == [True, False, False, False, False, False]
    assert mask(0, 4, None) == [False, False, False, True, True, False]
    assert mask(0, 1, 6) == [True, True, True, False, True, False]
    assert mask(100, 100, 100) == [True] * 5 + [False]


def test_rope_knows_its_width() -> None:
    """Two channels turn for each frequency."""
    assert Rope(torch.ones(32)).rotary_dim == 64
