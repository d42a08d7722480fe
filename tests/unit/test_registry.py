"""Policies by name."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from torch import Tensor

import kvkeep
from kvkeep.core import registry
from kvkeep.core.errors import BudgetError, ConfigError, UnknownNameError
from kvkeep.core.policy import Policy
from kvkeep.core.view import LayerView
from kvkeep.policies.ranked import RankedPolicy


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Leave no policy of a test behind."""
    before = dict(registry._added)
    yield
    registry._added.clear()
    registry._added.update(before)


def custom(name: str) -> type[Policy]:
    """A policy class of a user."""
    label = name

    @dataclass(frozen=True, kw_only=True)
    class Mine(RankedPolicy):
        name: ClassVar[str] = label

        def score(self, view: LayerView) -> Tensor:
            """Newest first."""
            return view.positions.float()

    return Mine


def test_every_training_free_policy_is_there() -> None:
    """A file that is not found by name might as well not exist."""
    expected = {
        "full", "random", "streaming-llm", "key-norm", "keydiff", "h2o", "tova", "snapkv", "r-kv", "cur",
        "vase-attnv", "vase-dkv", "expected-attention", "triattention", "set-diversity",
    }  # fmt: skip
    known = kvkeep.available_policies()
    assert expected <= set(known)
    assert list(known) == sorted(known)


def test_the_list_cannot_be_changed() -> None:
    """A user who edits the mapping must not break the registry for everyone."""
    with pytest.raises(TypeError):
        kvkeep.available_policies()["mine"] = kvkeep.Full  # type: ignore[index]


def test_register_and_find() -> None:
    """A user's policy is as good as ours."""
    mine = kvkeep.register_policy(custom("mine"))
    assert kvkeep.available_policies()["mine"] is mine
    assert isinstance(kvkeep.policy("mine", budget=100), mine)
    assert kvkeep.register_policy(mine) is mine  # again is fine


def test_a_taken_name() -> None:
    """A user's policy must not silently replace a published one."""
    with pytest.raises(ConfigError) as error:
        kvkeep.register_policy(custom("snapkv"))
    assert str(error.value) == "the name 'snapkv' is taken by kvkeep.policies.snapkv.SnapKV."


def test_no_name() -> None:
    """The message shows the line to add."""
    with pytest.raises(ConfigError) as error:
        kvkeep.register_policy(custom(""))
    assert str(error.value) == 'Mine has no name: set `name: ClassVar[str] = "my-policy"`.'


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("vase-attn", "vase-attnv"),
        ("snap-kv", "snapkv"),
        ("streamingllm", "streaming-llm"),
        ("rkv", "r-kv"),
        ("H2O", "h2o"),
        ("SnapKV", "snapkv"),
        ("TOVA", "tova"),
        ("key_norm", "key-norm"),
        ("randm", "random"),
    ],
)
def test_the_nearest_name_is_suggested(wrong: str, right: str) -> None:
    """A typing error should cost one glance."""
    with pytest.raises(UnknownNameError) as error:
        kvkeep.policy(wrong, budget=100)
    assert str(error.value).startswith(f"unknown policy {wrong!r}; did you mean {right!r}? Known: cur, ")


def test_no_suggestion_for_something_else() -> None:
    """A far-fetched suggestion is worse than none."""
    with pytest.raises(UnknownNameError) as error:
        kvkeep.policy("zzz", budget=100)
    assert str(error.value).startswith(
        "unknown policy 'zzz'. Known: cur, dbtrimkv, expected-attention, full,"
    )


def test_unknown_option() -> None:
    """A misspelt option must not be ignored."""
    with pytest.raises(UnknownNameError) as error:
        kvkeep.policy("snapkv", budget=100, windw=8)
    assert str(error.value).startswith(
        "unknown option of snapkv 'windw'; did you mean 'window'? Known: budget,"
    )


@pytest.mark.parametrize("name", sorted(kvkeep.available_policies()))
class TestEveryPolicy:
    """What holds for all policies, whoever wrote them."""

    def make(self, name: str, **options: Any) -> Policy:
        """With a small budget."""
        return kvkeep.policy(name, **{"budget": 64, "buffer": 16} | options)

    def test_options_rebuild_it(self, name: str) -> None:
        """A run is recorded by its options; they must give the same policy again."""
        policy = self.make(name)
        assert type(policy)(**policy.options()) == policy

    def test_is_frozen_and_hashable(self, name: str) -> None:
        """One object serves many generations: nothing may change in it."""
        policy = self.make(name)
        assert hash(policy) == hash(self.make(name))
        with pytest.raises(AttributeError):
            policy.buffer = 3  # type: ignore[misc]

    def test_page(self, name: str) -> None:
        """Every policy says what it does, where it comes from and what differs."""
        page = kvkeep.available_policies()[name].__doc__ or ""
        for section in ("Parameters", "Source", "Deviations", "Examples"):
            assert f"\n    {section}\n    {'-' * len(section)}\n" in page, section

    def test_budget_in_any_form(self, name: str) -> None:
        """A ratio is resolved later, by the cache; building must not need the length."""
        policy = self.make(name, budget=kvkeep.Budget.from_keep_ratio(0.25))
        assert policy.with_budget(policy.amount.resolve(context=400)).amount.count == 100

    def test_common_mistakes(self, name: str) -> None:
        """Numbers out of range are refused with the policy's name."""
        for options, message in (
            ({"buffer": 0}, f"{name}: buffer 0 is below 1 token."),
            ({"buffer": 2.5}, f"{name}: buffer 2.5 is not a whole number."),
            ({"sinks": -1}, f"{name}: sinks -1 is negative."),
            ({"trigger": "often"}, "trigger 'often' is unknown"),
            ({"prefill": "often"}, "prefill trigger 'often' is unknown"),
            ({"budget": "64"}, "budget '64' is neither a whole number of entries nor a kvkeep.Budget."),
        ):
            with pytest.raises(ConfigError) as error:
                self.make(name, **options)
            assert str(error.value).startswith(message)

    def test_protection_must_fit(self, name: str) -> None:
        """A budget that cannot hold what is protected is refused before the run."""
        kind = kvkeep.available_policies()[name]
        if not kind.bounded:
            pytest.skip("keeps everything")
        recent = self.make(name).recent
        with pytest.raises(BudgetError, match=r"always kept, more than the budget of 64: .* lower sinks or"):
            self.make(name, sinks=64 - recent + 1)
        if kind.recent_option == "buffer":
            with pytest.raises(BudgetError) as error:
                self.make(name, buffer=64)
            assert str(error.value) == (
                f"{name}: the 64 newest entries are always kept, which leaves nothing of a budget of 64: "
                "raise the budget above 64, or lower buffer (buffer=32)."
            )


def test_advice_for_a_budget_of_one() -> None:
    """Lowering the buffer to zero would be bad advice."""
    with pytest.raises(BudgetError) as error:
        kvkeep.KeyNorm(budget=1, buffer=1)
    assert str(error.value).endswith("leaves nothing of a budget of 1: raise the budget above 1.")


def test_looking_up_imports_no_transformers() -> None:
    """`kvkeep policies` must not wait for transformers to load."""
    code = "import sys, kvkeep; kvkeep.available_policies(); sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_composition_tells_its_options_too() -> None:
    """Saving a cache, and every JSON report, writes the options down."""
    policy = kvkeep.policy("vase-dkv(rank=8) + sample + reserve(slots=9)", budget=128)
    assert type(policy)(**policy.options()) == policy
