"""Records survive the log and refuse nonsense."""

from __future__ import annotations

import json

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
