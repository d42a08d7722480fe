"""Without a reservation requests may lose their blocks and begin again: the answer stays the same."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serving.engine.conftest import prompts
from tests.serving.engine.reference import overlap
from tests.serving.engine.running import Answer, Running, engine

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm has an environment for it")

LENGTHS = (40, 33, 90, 5, 64, 40, 17, 150)
NEW = 110


#: A policy that draws at every eviction; a request wants four blocks, and there are 14.
SETTING = {"policy": "vase-attnv", "budget": 64, "buffer": 32, "reserve": False}
#: What a request of 256 tokens owns where its prompt stays whole.
BLOCKS = {"kept": 12, "defer": 10}
POOL = {"blocks": 14, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    """An engine with too few blocks."""
    with engine(SETTING, **POOL) as running:
        yield running


@pytest.fixture(scope="module")
def alone(served: Running) -> list[list[int]]:
    """What each request is answered when nobody else asks."""
    answers = [served.answer([prompt], NEW)[0].tokens for prompt in prompts(*LENGTHS)]
    assert served.metric("num_preemptions") == 0
    return answers


def test_a_preempted_request_goes_on_where_it_was(served: Running, alone: list[list[int]]) -> None:
    """Under load users would get other answers, with entries evicted at other times."""
    together = served.answer(prompts(*LENGTHS), NEW)
    assert served.metric("num_preemptions") > 0
    assert [answer.tokens for answer in together] == alone
    assert served.empty


def test_every_request_has_draws_of_its_own(served: Running) -> None:
    """All requests of a server would keep the same places of their texts, and fail together."""
    (prompt,) = prompts(90, seed=4)

    def written(**extra: int) -> Answer:
        return served.answer([prompt], NEW, look=True, extra_args=extra or None)[0]

    own = [written(), written(kvkeep_sequence=1), written(kvkeep_sequence=2)]
    pairs = itertools.combinations((answer.held for answer in own), 2)
    assert max(overlap(mine, yours) for mine, yours in pairs) < 0.95
    assert written(kvkeep_sequence=1) == own[1]
    # Two samples of one prompt agree, whoever stands between them.
    first, _, second = served.answer([prompt, prompts(40)[0], prompt], NEW, look=True)
    assert first.held == second.held == own[0].held


def test_requests_that_leave_do_not_touch_the_others(served: Running, alone: list[list[int]]) -> None:
    """A client that hangs up would change what its neighbours read."""

    def leave(step: int, open_: dict[str, Answer]) -> list[str]:
        return [list(open_)[1]] if step in (2, 20, 45) and len(open_) > 1 else []

    together = served.answer(prompts(*LENGTHS), NEW, watch=leave)
    assert sum(answer.aborted for answer in together) == 3
    for answer, wanted in zip(together, alone, strict=True):
        assert answer.tokens == (wanted[: len(answer.tokens)] if answer.aborted else wanted)
    assert served.empty


# Engines of their own come last: one that ends takes vLLM's process groups along, and `served` needs them.


@pytest.mark.parametrize("setting", [{"prompt": "kept"}, {"prefill": "defer"}], ids=["kept", "defer"])
def test_requests_that_own_all_their_blocks_go_on_together(setting: dict[str, Any]) -> None:
    """Their answers would count as prompts, and they would wait for each other with blocks to spare."""
    asked, new, at_once = prompts(20, 25), 190, []
    shared = {**SETTING, **setting, "reserve": True}
    # Enough for one request of the largest length, and for two of these.
    with engine(shared, blocks=BLOCKS[next(iter(setting.values()))], max_model_len=256) as running:
        alone = [running.answer([prompt], new)[0].tokens for prompt in asked]

        def stop(step: int, open_: dict[str, Answer]) -> list[str]:
            at_once.append(len(running.scheduler.running))
            if step in (1, 30, 160):  # in the prompts, before the first eviction, and after some
                running.scheduler.reset_prefix_cache(reset_running_requests=True)
            return []

        together = running.answer(asked, new, watch=stop, steps=600)
        assert running.metric("num_preemptions") == 6
        assert [answer.tokens for answer in together] == alone
        assert at_once[160] == 2
        assert running.empty


def test_steps_in_flight(alone: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where vLLM schedules a step before the last one has ended, blocks would be reused under its feet."""
    from vllm.platforms.cpu import CpuPlatform

    stock = CpuPlatform.check_and_update_config

    def forced(config: Any) -> None:  # the CPU platform switches it off, and no option turns it on
        stock(config)
        config.scheduler_config.async_scheduling = True

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", staticmethod(forced))
    with engine(SETTING, **POOL) as running:
        assert type(running.scheduler).__name__ == "AsyncScheduler"
        together = running.answer(prompts(*LENGTHS), NEW)
        assert running.metric("num_preemptions") > 0
        assert [answer.tokens for answer in together] == alone
        assert running.empty
