"""The tree of errors."""

from __future__ import annotations

import pytest
import torch

import kvkeep
from kvkeep.core import errors
from kvkeep.core.policy import check_scores
from kvkeep.testing.views import make_counts, make_view

TREE = {
    "ConfigError": ("KvkeepError", ValueError),
    "BudgetError": ("ConfigError", ValueError),
    "UnknownNameError": ("ConfigError", ValueError),
    "UnsupportedError": ("KvkeepError", Exception),
    "ScoreError": ("KvkeepError", Exception),
    "NotANumberError": ("ScoreError", Exception),
    "CacheError": ("KvkeepError", RuntimeError),
    "CacheIntegrityError": ("CacheError", RuntimeError),
    "DataFileError": ("KvkeepError", Exception),
    "MissingExtraError": ("KvkeepError", ImportError),
}


@pytest.mark.parametrize("name", TREE)
def test_the_documented_tree(name: str) -> None:
    """Callers catch a branch; an error outside of it would reach the user as a traceback."""
    parent, builtin = TREE[name]
    assert issubclass(getattr(errors, name), getattr(errors, parent))
    assert issubclass(getattr(errors, name), builtin)
    assert name in (errors.__doc__ or "")


def test_every_reason_is_told() -> None:
    """One run shows all that is wrong."""
    error = errors.UnsupportedError("cannot do this", ["first", "second"])
    assert str(error) == "cannot do this:\n  - first\n  - second"
    assert error.reasons == ("first", "second")


def test_missing_extra_carries_the_line_to_type() -> None:
    """The user copies one line."""
    text = str(errors.MissingExtraError("gguf", "gguf", "reading a GGUF file"))
    assert text == (
        "reading a GGUF file needs the package 'gguf', which is not installed. "
        'Install it with: pip install "kvkeep[gguf]"'
    )


class TestScores:
    """Scores that cannot be ranked stop the run."""

    def test_nan(self) -> None:
        """NaN compares as false everywhere: the wrong entries would go, silently."""
        policy = kvkeep.KeyNorm(budget=24, buffer=8)
        view = make_view(policy, layer=7)
        view.keys[0, 1, 3, 0] = float("nan")
        with pytest.raises(errors.NotANumberError) as error:
            policy.decide([view], [make_counts(view)])
        assert str(error.value).startswith("key-norm returned NaN for an entry of layer 7: ")

    def test_nan_where_nobody_looks(self) -> None:
        """Empty slots and protected entries may hold anything."""
        policy = kvkeep.KeyNorm(budget=24, buffer=8)
        view = make_view(policy, lengths=(40, 30))
        scores = torch.zeros(view.shape).masked_fill(~view.candidates, float("nan"))
        check_scores("mine", view, scores)
        policy.select(view, scores, make_counts(view))

    def test_shape(self) -> None:
        """Scores per query head would be read as something else."""
        view = make_view(kvkeep.KeyNorm(budget=24, buffer=8))
        with pytest.raises(errors.ScoreError) as error:
            check_scores("mine", view, torch.zeros(1, 6, 40))
        assert str(error.value) == (
            "mine returned scores of shape (1, 6, 40) for layer 0; expected "
            "[batch, kv_heads, entries] = (1, 2, 40)."
        )
