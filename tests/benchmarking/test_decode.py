"""The decode benchmark: numbers that add up, and bytes that are those of the tensors."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from transformers import PreTrainedModel

import kvkeep
from kvkeep.benchmarking.bandwidth import Bandwidth, measure_bandwidth
from kvkeep.benchmarking.decode import DecodeSettings, build_arms, run_decode
from kvkeep.benchmarking.models import SHAPES, random_model, step_weight_bytes, stock_twin
from kvkeep.benchmarking.report import ArmReport, DecodeReport
from kvkeep.benchmarking.timing import Block
from kvkeep.core.errors import ConfigError, UnknownNameError
from kvkeep.core.traits import Traits
from kvkeep.policies.vase import VaSEDKV


@dataclass(frozen=True, kw_only=True)
class Gated(VaSEDKV):
    """Asks for what no model here has."""

    name: ClassVar[str] = "gated"

    @property
    def traits(self) -> Traits:
        return Traits(log_retention=True)


LAYERS, KV_HEADS, DIM = 2, 2, 8
ENTRY = LAYERS * KV_HEADS * 2 * DIM * 4


@pytest.fixture(scope="module")
def report() -> DecodeReport:
    model = random_model("tiny")
    policies = [kvkeep.Full(), kvkeep.VaSEAttnV(budget=48, buffer=16), kvkeep.VaSEDKV(budget=48, buffer=16)]
    settings = DecodeSettings(batch=2, context=200, prompt=20, steps=20, full_steps=3, rounds=3)
    return run_decode(model, policies, settings)


def arm(report: DecodeReport, name: str) -> ArmReport:
    return next(each for each in report.arms if each.name == name)


def test_every_arm_is_measured(report: DecodeReport) -> None:
    """A table without its baseline says nothing."""
    assert [each.name for each in report.arms] == [
        "DynamicCache",
        "StaticCache",
        "full (kvkeep)",
        "vase-attnv",
        "vase-dkv",
    ]
    assert report.skipped == {}
    assert report.order[:5] == list(reversed(report.order[5:10]))


def test_cache_bytes_are_those_of_the_budget(report: DecodeReport) -> None:
    """The claim of the library: memory is a function of the budget, not of the context."""
    assert arm(report, "vase-attnv").cache_bytes == 2 * (48 + 16) * ENTRY
    assert arm(report, "vase-dkv").cache_bytes == 2 * (48 + 16) * ENTRY
    assert arm(report, "DynamicCache").cache_bytes == 2 * 203 * ENTRY
    assert arm(report, "StaticCache").cache_bytes == 2 * 203 * ENTRY


def test_the_query_ring_is_counted_beside_the_cache(report: DecodeReport) -> None:
    """A policy that records queries holds more than keys and values, and must say so."""
    positions = LAYERS * 2 * KV_HEADS * 64 * 4
    ring = LAYERS * (2 * 4 * 16 * DIM * 4 + 2 * 16 * 8)
    assert arm(report, "vase-dkv").beside_bytes == positions
    assert arm(report, "vase-attnv").beside_bytes == positions + ring


def test_numbers_follow_from_the_rounds(report: DecodeReport) -> None:
    """Tokens per second, ratios and floors must be derivable from what was timed."""
    full = arm(report, "DynamicCache")
    best = arm(report, report.best_stock)
    assert best.step_ms.median == min(a.step_ms.median for a in report.arms if a.kind == "stock")
    for each in report.arms:
        assert each.tokens_per_second == pytest.approx(2 * 1e3 / each.step_ms.median)
        paired = sorted(a / b for a, b in zip(full.round_ms, each.round_ms, strict=True))
        assert each.ratio_full.median == pytest.approx(paired[1])
        assert each.times_floor == pytest.approx(each.step_ms.median / each.floor_ms)
        read = report.weight_bytes + 2 * each.entries_read * ENTRY
        assert each.floor_ms == pytest.approx(1e3 * read / report.bandwidth.copy_bytes_per_second)
    assert full.ratio_full.median == 1.0


def test_a_round_holds_whole_periods(report: DecodeReport) -> None:
    """20 steps asked, a period of 16: 32 steps and two evictions, each paid for in full."""
    for name in ("vase-attnv", "vase-dkv"):
        each = arm(report, name)
        assert (each.steps, each.evictions) == (32, 2)
        assert 0 < each.eviction_share < 1
        # The steps of a period read 49 … 64 entries.
        assert each.entries_read == pytest.approx(48 + 17 / 2)
    assert arm(report, "full (kvkeep)").eviction_share is None


def test_the_share_is_scaled_to_whole_periods() -> None:
    """A clock that falls differently (one eviction in two periods) must not halve the overhead."""
    common = {
        "name": "x", "kind": "policy", "batch": 1, "period": 16, "entries_read": 1.0, "cache_bytes": 1,
        "beside_bytes": 0, "peak_bytes": 1, "floor_ms": 1.0,
    }  # fmt: skip
    block = Block(seconds=1.0, steps=32)
    even = ArmReport.build(blocks=[block], eviction_seconds=[0.2], evictions=[2], **common)
    missed = ArmReport.build(blocks=[block], eviction_seconds=[0.1], evictions=[1], **common)
    assert even.eviction_share == pytest.approx(0.2)
    assert missed.eviction_share == pytest.approx(0.2)
    assert even.eviction_ms == missed.eviction_ms == pytest.approx(100.0)


def test_a_cache_that_is_still_filling_has_its_own_share(tiny: PreTrainedModel) -> None:
    """The published protocol starts far below the budget: scaling its few evictions up would be wrong."""
    settings = DecodeSettings(batch=1, context=10, prompt=10, steps=96, full_steps=1, rounds=1, stock=())
    report = run_decode(tiny, [VaSEDKV(budget=48, buffer=16)], settings)
    each = arm(report, "vase-dkv")
    assert each.evictions == (10 + 96 - 48) // 16
    measured = each.evictions * each.eviction_ms / (each.step_ms.median * each.steps)
    assert each.eviction_share == pytest.approx(measured)
    assert not any("synthetic" in note for note in report.notes)


def test_extremes_are_dropped_from_the_trimmed_mean() -> None:
    """The published protocol: five runs, without the quickest and the slowest."""
    blocks = [Block(seconds=s, steps=1) for s in (9.0, 1.0, 2.0, 3.0, 4.0)]
    built = ArmReport.build(
        name="x", kind="stock", batch=6, blocks=blocks, eviction_seconds=[], evictions=[], period=None,
        entries_read=1.0, cache_bytes=1, beside_bytes=0, peak_bytes=1, floor_ms=1.0,
    )  # fmt: skip
    assert built.trimmed_tokens_per_second == pytest.approx(6 / 3.0)


def test_json_holds_everything_and_says_what_is_synthetic(report: DecodeReport) -> None:
    """Whoever reads a recorded result must see that the context was not decoded."""
    data = json.loads(json.dumps(report.as_dict()))
    assert data["kind"] == "decode"
    assert {"machine", "settings", "arms", "best_stock", "bandwidth", "weight_bytes", "notes"} <= data.keys()
    assert data["settings"]["context"] == 200
    assert any("synthetic" in note for note in data["notes"])
    assert data["arms"][3]["ratio_stock"].keys() == {"median", "low", "high"}


def test_markdown_has_one_row_per_arm(report: DecodeReport) -> None:
    """The table in benchmarks/results is this text."""
    lines = [line for line in report.markdown().splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(report.arms)
    assert {line.count("|") for line in lines} == {len(report.header()) + 1}


def test_policies_that_cannot_run_are_named(tiny: PreTrainedModel) -> None:
    """Leaving a row out in silence would look like a choice."""
    settings = DecodeSettings(batch=1, context=100, prompt=10, stock=())
    surprised = kvkeep.policy("snapkv(window=8) + surprise", budget=48, buffer=16)
    arms, skipped = build_arms(tiny, [Gated(budget=48, buffer=16), surprised], settings)
    assert [each.name for each in arms] == ["DynamicCache"]
    assert "retention gates" in skipped["gated"]
    assert "where the model is unsure" in skipped["snapkv + surprise"]


def test_policies_that_need_calibration_are_measured_too(tiny: PreTrainedModel) -> None:
    """Their speed does not depend on what the statistics say, so the random prompt will do."""
    settings = DecodeSettings(batch=2, context=100, prompt=20, steps=16, full_steps=1, rounds=1, stock=())
    report = run_decode(tiny, [kvkeep.policy("triattention", budget=48, buffer=16)], settings)
    assert report.skipped == {}
    assert arm(report, "triattention").evictions == 1


def test_the_twin_shares_its_weights_and_keeps_stock_attention(tiny: PreTrainedModel) -> None:
    """A baseline through our attention function would not be the stock one; a copy would double memory."""
    kvkeep.prepare(tiny)
    twin = stock_twin(tiny)
    assert twin.config._attn_implementation == "sdpa"
    assert tiny.config._attn_implementation == "kvkeep_sdpa"
    pairs = zip(twin.parameters(), tiny.parameters(), strict=True)
    assert all(ours is theirs for ours, theirs in pairs)


def test_weight_bytes_count_what_a_step_reads(tiny: PreTrainedModel) -> None:
    """Tied: the table is read as output projection. Untied: its input copy is not read."""
    total = sum(p.nbytes for p in tiny.parameters())
    assert step_weight_bytes(tiny) == total
    kind, options = SHAPES["tiny"]
    untied = type(tiny)(kind(**options | {"tie_word_embeddings": False}))
    table = untied.get_input_embeddings().weight.nbytes
    assert step_weight_bytes(untied) == sum(p.nbytes for p in untied.parameters()) - table


def test_bandwidth_counts_both_directions() -> None:
    """Counting only what is written would halve every floor's speed."""
    measured = measure_bandwidth(torch.device("cpu"), buffer_bytes=1 << 22, repeats=2)
    assert measured.copy_bytes_per_second > 1e8
    assert Bandwidth(copy_bytes_per_second=2e9, buffer_bytes=1).floor_seconds(1e9) == 0.5


def test_settings_refuse_what_cannot_be() -> None:
    """A context shorter than its prompt has no meaning."""
    with pytest.raises(ConfigError, match="prompt of 64 tokens does not fit a context of 10"):
        DecodeSettings(context=10)
    with pytest.raises(ConfigError, match="rounds 0 is below 1"):
        DecodeSettings(rounds=0)
    with pytest.raises(UnknownNameError, match="did you mean 'static-compiled'"):
        DecodeSettings(stock=("static-compile",))
    with pytest.raises(UnknownNameError, match="unknown shape 'qwen3-14'"):
        random_model("qwen3-14")


@pytest.mark.parametrize(
    ("shape", "parameters"), [("qwen3-14b", 14.768e9), ("qwen3-4b", 4.022e9), ("smollm2-135m", 134.5e6)]
)
def test_shapes_are_those_of_the_real_models(shape: str, parameters: float) -> None:
    """Published numbers are compared with a model of this shape; a wrong layer count would decide it."""
    model = random_model(shape, dtype="bfloat16", device="meta")
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(parameters, rel=1e-3)
    assert model.dtype == torch.bfloat16
