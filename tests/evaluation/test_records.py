"""Records survive the log and refuse nonsense."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kvkeep.core.errors import DataFileError
from kvkeep.evaluation.records import Run, RunHeader, SampleRecord
from tests.evaluation.runs import header, sample


def test_records_survive_a_line_of_json() -> None:
    """A record that came back different from the log would be refused by resume and compare."""
    one, top = sample("p/1", 2, True, extra={"text": "so 4"}), header(policy="h2o", seeds=(1, 2, 3))
    assert SampleRecord.from_dict(json.loads(json.dumps(one.as_dict()))) == one
    assert RunHeader.from_dict(json.loads(json.dumps(top.as_dict()))) == top
    assert one.key == ("p/1", 2)
    assert one.group == "p/1"


def test_a_line_of_another_version_says_which_fields() -> None:
    """A log from the future must not be half understood."""
    saved = {**sample("p", 0, True).as_dict(), "weather": "fine"}
    del saved["score"]
    with pytest.raises(DataFileError, match=r"missing \['score'\], unknown \['weather'\]"):
        SampleRecord.from_dict(saved)
    with pytest.raises(DataFileError, match="log format 9"):
        header(format=9)


def test_contradictions_are_refused_together() -> None:
    """A sample that is correct and timed out would be counted on both sides."""
    with pytest.raises(DataFileError, match=r"contradicts.*outside 0..1.*negative"):
        sample("p", -1, True, answer_class="timed_out", score=2.0)
    with pytest.raises(DataFileError, match="split 'test'"):
        header(split="test")


def test_mean_cache_of_a_run_weights_steps() -> None:
    """A policy that rambles holds its memory longer: the mean over samples would hide that."""
    samples = (
        sample("a", 0, True, steps=100, mean_cache=50.0, prefill_cache=10.0),
        sample("b", 0, True, steps=300, mean_cache=90.0, prefill_cache=20.0),
    )
    run = Run(header=header(), samples=samples)
    assert run.mean_cache == 80.0
    assert run.mean_cache_per_sample == 70.0
    assert run.prefill_cache == 15.0
    assert Run(header=header(), samples=()).mean_cache == 0.0


def test_memory_of_a_run_weights_steps_and_is_entries_in_older_logs() -> None:
    """Studies that were sealed before bytes were noted must still be read."""
    samples = (
        sample("a", 0, True, steps=100, mean_cache=50.0, prefill_cache=10.0, peak_cache=60.0),
        sample("b", 0, True, steps=300, mean_cache=90.0, prefill_cache=20.0, peak_cache=99.0),
    )
    old = Run(header=header(), samples=samples)
    assert (old.mean_memory, old.prefill_memory, old.peak_memory) == (80.0, 15.0, 99.0)
    weighed = tuple(
        replace(each, mean_memory=memory, prefill_memory=memory / 2, peak_memory=memory * 2)
        for each, memory in zip(samples, (20.0, 40.0), strict=True)
    )
    few = header(precision={"bits": 4, "protect": "range"})
    found = Run(header=few, samples=weighed)
    assert (found.mean_memory, found.prefill_memory, found.peak_memory) == (35.0, 15.0, 80.0)
    unknown = Run(header=few, samples=(samples[0], weighed[1]))
    assert (unknown.mean_memory, unknown.prefill_memory, unknown.peak_memory) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("precision", [None, {"bits": 4, "protect": "range"}])
def test_a_sample_that_took_no_step_leaves_memory_measured(precision: dict[str, object] | None) -> None:
    """An answer may end with the token that the prompt gave: no step held anything, and nothing is amiss."""
    memory = {"mean_memory": 40.0, "peak_memory": 50.0, "prefill_memory": 10.0}
    samples = (sample("a", 0, True, steps=9, **memory), sample("b", 0, False, steps=0, tokens=1, **memory))
    found = Run(header=header(precision=precision), samples=samples)
    assert (found.mean_memory, found.prefill_memory, found.peak_memory) == (40.0, 10.0, 50.0)
    assert Run(header=header(precision=precision), samples=samples[1:]).mean_memory == 0.0
