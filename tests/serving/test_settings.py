"""What an operator writes, read before a model is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from kvkeep.core.errors import ConfigError
from kvkeep.serving.settings import Settings

GOOD = {"policy": "snapkv", "budget": 96}


@pytest.mark.parametrize("additional", [None, {}, {"other": 1}, "text", {"kvkeep": None}])
def test_without_the_setting_nothing_is_read(additional: Any) -> None:
    """An engine that did not ask for it would get a bounded cache."""
    assert Settings.read(additional) is None


def test_defaults_stand_beside_what_is_given() -> None:
    """An operator would have to write everything."""
    settings = Settings.read({"kvkeep": {**GOOD, "buffer": 32}, "other": 1})
    assert settings == Settings(policy="snapkv", budget=96, buffer=32)


def test_every_problem_is_named_at_once() -> None:
    """Mistakes would show one start of the server after the other."""
    given = {"budget": "96", "buffers": 32, "buffer": True, "prefill": "late", "seed": 0.5, "reserve": 1}
    with pytest.raises(ConfigError) as caught:
        Settings.read({"kvkeep": given})
    text = str(caught.value)
    for part in (
        "'buffers' is unknown",
        "'policy' is missing",
        "budget '96' is not",
        "buffer True is not",
        "prefill 'late' is not",
        "seed 0.5 is not",
        "reserve 1 is not",
        "--additional-config '{",
    ):
        assert part in text


@pytest.mark.parametrize("given", ["snapkv", ["snapkv", 96], 96])
def test_a_setting_that_is_no_object(given: Any) -> None:
    """The shape that is wanted would have to be looked up."""
    with pytest.raises(ConfigError, match=r"not an object: write --additional-config"):
        Settings.read({"kvkeep": given})


def test_the_policy_has_all_that_was_written() -> None:
    """An option would silently do nothing."""
    settings = Settings(policy="snapkv", budget=96, buffer=16, prompt="kept", options={"window": 8})
    policy = settings.make_policy()
    assert (policy.amount.count, policy.amount.prompt) == (96, "kept")
    assert (policy.buffer, policy.recent, policy.traits.trigger.prefill) == (16, 8, "chunk")
    deferred = Settings(policy="snapkv", budget=96, prefill="defer").make_policy()
    assert deferred.traits.trigger.prefill == "defer"


@pytest.mark.parametrize(
    ("policy", "options", "words"),
    [
        ("snapvk", {}, "snapvk"),
        ("snapkv", {"windows": 8}, "windows"),
        ("snapkv", {"window": 4096}, "budget"),
        ("snapkv", {"window": "8"}, "window"),
    ],
)
def test_a_policy_that_cannot_be_made(policy: str, options: dict[str, Any], words: str) -> None:
    """The server would stop with a traceback that means nothing to an operator."""
    with pytest.raises(ConfigError, match=words):
        Settings(policy=policy, budget=96, options=options).make_policy()
