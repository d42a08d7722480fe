"""The flatness benchmark: windows, deviation, memory that stands still."""

from __future__ import annotations

import json

import pytest
from transformers import PreTrainedModel

import kvkeep
from kvkeep.benchmarking.flat import FlatReport, FlatSettings, Window, run_flat
from kvkeep.benchmarking.timing import Spread, alternate
from kvkeep.core.errors import ConfigError


def window(end: int, ms: float) -> Window:
    return Window(end=end, ms=ms, period_ms=ms, memory_bytes=0, cache_bytes=0)


def test_every_window_is_reported_and_memory_stands_still(tiny: PreTrainedModel) -> None:
    """The point of the command: after the budget is full, cache bytes never change."""
    settings = FlatSettings(prompt=8, tokens=192, window=48, rounds=2)
    seen: list[int] = []
    report = run_flat(
        tiny,
        kvkeep.VaSEAttnV(budget=32, buffer=16),
        settings,
        progress=lambda done, total, label: seen.append(done),
    )
    assert [each.end for each in report.windows] == [48, 96, 144, 192]
    assert {each.cache_bytes for each in report.windows} == {(32 + 16) * 2 * 2 * 2 * 8 * 4}
    assert seen == list(range(1, 192 + 48 + 1))
    assert (report.early, report.late_over_early.low > 0) == (48, True)
    data = json.loads(json.dumps(report.as_dict()))
    assert data["deviation"] == report.deviation()
    assert len(report.rows()) == 4


def test_the_deviation_leaves_out_the_window_that_fills_the_cache() -> None:
    """The first tokens attend to little and are quick; that is not a lack of flatness."""
    report = FlatReport(
        machine={},
        settings=FlatSettings(tokens=4096, window=1024),
        policy="x",
        budget=512,
        early=1024,
        late_over_early=Spread.of([1.0]),
        windows=[window(1024, 5.0), window(2048, 10.0), window(3072, 10.0), window(4096, 10.4)],
    )
    assert report.deviation() == pytest.approx(0.04)


def test_late_and_early_caches_take_turns(tiny: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ratio must pair the same policy at two ages; two caches of one age would always look flat."""
    seen: dict[str, int] = {}

    def spy(arms: list, **options: object) -> object:
        seen.update({arm.name: arm.arm.cache.rows.seq_lens[0] for arm in arms})
        return alternate(arms, **options)

    monkeypatch.setattr("kvkeep.benchmarking.flat.alternate", spy)
    run_flat(tiny, kvkeep.VaSEDKV(budget=32, buffer=16), FlatSettings(prompt=8, tokens=96, window=48))
    assert seen == {"after 48": 56, "after 96": 104}


def test_too_few_tokens_are_refused() -> None:
    """One window has nothing to be compared with."""
    with pytest.raises(ConfigError, match="fewer than two windows"):
        FlatSettings(tokens=1024, window=1024)
