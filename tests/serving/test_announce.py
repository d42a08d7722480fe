"""The line at start: its numbers against the schedule's."""

from types import SimpleNamespace

import pytest

from kvkeep.serving.announce import start_line
from kvkeep.serving.schedule import Schedule


def line(prompt, prefix_caching=False, **more):
    schedule = Schedule(budget=96, buffer=32, block_size=32, prompt=prompt, max_len=1024, **more)
    spec = SimpleNamespace(
        schedule=schedule, block_size=32, page_size_bytes=1024, layers=4, label="snapkv, budget 96"
    )
    return start_line(spec, 64, prefix_caching)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("chunk", "owns 4 blocks (16.0 KiB) instead of 32 (128.0 KiB)"),
        ("defer", "owns 4 blocks (16.0 KiB) (more while a longer prompt is read) instead of 32"),
        ("kept", "owns 4 blocks (16.0 KiB) besides those of its prompt instead of 32"),
    ],
)
def test_a_request_before_and_after(prompt, words):
    said = line(prompt)
    assert said.startswith("kvkeep active: snapkv, budget 96. A request of 1,024 tokens ")
    assert words in said
    assert said.endswith("16 such requests fit at once instead of 2.")


def test_blocks_for_recordings_are_counted():
    assert "owns 5 blocks" in line("chunk", side_blocks=1)


def test_prefix_caching_is_mentioned_where_it_is_on():
    assert line("chunk", prefix_caching=True).endswith("Prefix caching does not apply to it.")
