"""`kvkeep demo` on the real model: what the command claims, and what it prints."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from kvkeep.cli.app import app
from kvkeep.cli.demo_model import demo_model_ready
from kvkeep.cli.ship_log import ANSWER

pytestmark = [pytest.mark.model, pytest.mark.slow]


@pytest.fixture(scope="module")
def runs() -> dict[str, Any]:
    """One report per policy, from the command itself."""
    if not demo_model_ready():
        pytest.skip("the demo model has not been fetched: make setup (or kvkeep demo --model-only)")
    policies = "full; vase-attnv; streaming-llm"
    result = CliRunner().invoke(app, ["demo", "--policies", policies, "--json"])
    assert result.exit_code == 0, result.stderr
    return {report["policy"]["name"]: report for report in json.loads(result.stdout)}


def test_the_full_cache_finds_the_password(runs: dict[str, Any]) -> None:
    """If the model alone cannot answer, the demo shows nothing about policies."""
    report = runs["full"]
    assert ANSWER in report["answers"][0]["text"]
    assert 1900 <= report["answers"][0]["prompt_tokens"] <= 2100
    assert report["trace"]["evictions"] == 0


def test_vase_finds_it_with_a_quarter_of_the_memory(runs: dict[str, Any]) -> None:
    """The headline of the project, on a text that anybody can read."""
    report, full = runs["vase-attnv"], runs["full"]
    assert ANSWER in report["answers"][0]["text"]
    assert report["trace"]["evictions"] >= 1
    # A quarter, and the buffer of 64 entries that fills up between evictions.
    quarter = (report["answers"][0]["prompt_tokens"] + 48) // 4
    assert quarter <= report["trace"]["mean_entries"] <= quarter + 64
    assert report["trace"]["kv_bytes"] == (quarter + 64) * 45 * 1024  # 45 KiB an entry in float32
    assert report["trace"]["kv_bytes"] < 0.3 * full["trace"]["kv_bytes"]


def test_the_newest_entries_alone_do_not_hold_the_password(runs: dict[str, Any]) -> None:
    """If a window of the same size answered too, the question would not measure memory."""
    assert ANSWER not in runs["streaming-llm"]["answers"][0]["text"]
