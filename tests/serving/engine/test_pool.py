"""A pool too small for the full lengths: more requests at once, none preempted, every block comes back."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest

from tests.serving.engine.conftest import prompts
from tests.serving.engine.running import Answer, Running, engine

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm has an environment for it")

BLOCKS, PROMPT, NEW = 40, 240, 150  # a request of full length needs 13 blocks
STREAM = {"policy": "streaming-llm", "budget": 48, "buffer": 16}  # and one of these 2
FIRST = 90  # steps in which requests at once are counted


@dataclass
class Load:
    """What requests did to an engine: most of the pool used, mean requests at once, preemptions."""

    usage: float
    at_once: float
    preempted: int
    answers: list[Answer]


def load(served: Running, requests: int, steps: int | None = None) -> Load:
    """Put equal requests in and watch."""
    at_once: list[int] = []
    usage: list[float] = []
    preempted: dict[str, int] = {}

    def watch(step: int, open_: dict[str, Answer]) -> list[str]:
        if step <= FIRST and any(answer.tokens for answer in open_.values()):
            at_once.append(len(served.scheduler.running))
        # vLLM's own counter tells of a preempted request when it goes on, which may be never here.
        preempted.update({name: each.num_preemptions for name, each in served.scheduler.requests.items()})
        if step % 10 == 0:
            usage.append(served.metric("kv_cache_usage_perc"))
        return []

    answers = served.answer(prompts(*[PROMPT] * requests), NEW, watch=watch, steps=steps)
    return Load(max(usage), sum(at_once) / len(at_once), sum(preempted.values()), answers)


def test_three_times_as_many_requests_run_at_once() -> None:
    """The memory that a bounded cache saves would help nobody."""
    with engine(None, blocks=BLOCKS, enable_prefix_caching=False) as plain:
        queued, two = load(plain, 24, steps=FIRST), load(plain, 2)
        assert queued.preempted > 0
        assert two.preempted == 0
    with engine(STREAM, blocks=BLOCKS) as bounded:
        bounded_two = load(bounded, 2, steps=FIRST)
        assert bounded.empty  # those that were stopped gave their blocks back
        all_ = load(bounded, 24)
        assert bounded.empty
        assert bounded.metric("num_preemptions") == 0
    assert all_.preempted == 0
    assert [len(answer.tokens) for answer in all_.answers] == [NEW] * 24
    assert all_.at_once >= 3 * queued.at_once
    assert bounded_two.usage == pytest.approx(4 / BLOCKS)
    assert bounded_two.usage <= two.usage / 3


@pytest.mark.parametrize(
    ("setting", "requests"),
    [
        ({**STREAM, "policy": "snapkv", "budget": 80}, 500),
        ({"policy": "snapkv + adaptive-heads", "budget": 48, "buffer": 16}, 100),
        ({"policy": "snapkv", "budget": 48, "buffer": 32, "prefill": "defer"}, 100),
        ({"policy": "vase-dkv", "budget": 48, "buffer": 16, "prompt": "kept"}, 100),
    ],
    ids=["chunk", "ragged", "defer", "kept"],
)
def test_the_pool_is_full_again(setting: dict[str, Any], requests: int) -> None:
    """A server would run out of memory after some days."""
    source = random.Random(3)
    asked = prompts(*(source.choice((1, 7, 32, 33, 64, 120, 250)) for _ in range(requests)))
    new = [source.choice((1, 2, 9, 33)) for _ in asked]

    def leave(step: int, open_: dict[str, Answer]) -> list[str]:
        return [source.choice(list(open_))] if step % 12 == 0 and open_ else []

    with engine(setting, blocks=60, max_num_batched_tokens=256) as bounded:
        answers = bounded.answer(asked, new, watch=leave)
        assert bounded.empty
        assert bounded.metric("num_preemptions") == 0
    ended = [answer for answer in answers if not answer.aborted]
    assert len(ended) < requests
    assert [len(answer.tokens) for answer in ended] == [
        count for answer, count in zip(answers, new, strict=True) if not answer.aborted
    ]
