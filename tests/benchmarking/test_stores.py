"""The benchmark of the stores: as many entries in every arm, and a long head where one is promised."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import kvkeep
from kvkeep.benchmarking.arms import Scene, SkewedArm
from kvkeep.benchmarking.memory import PeakMemory
from kvkeep.benchmarking.models import random_prompt
from kvkeep.benchmarking.stores import StoresSettings, run_stores
from kvkeep.core.errors import ConfigError


def test_arms_hold_as_many_entries(tiny: PreTrainedModel) -> None:
    """A ratio between arms of different size would be the size's, not the store's."""
    settings = StoresSettings(batch=3, prompt=8, skew=4, rounds=2)
    report = run_stores(tiny, kvkeep.VaSEAttnV(budget=32, buffer=16), settings)
    names = [arm.name for arm in report.arms]
    assert names == [
        "dense, vase-attnv",
        "paged, vase-attnv",
        "dense, no eviction",
        "paged, no eviction",
        "paged, one head 4 times the mean",
    ]
    entries = [arm.entries for arm in report.arms]
    assert entries[0] == entries[1]
    assert entries[2] == entries[3] == pytest.approx(entries[4])
    assert report.arms[0].slower.median == 1.0
    assert json.loads(json.dumps(report.as_dict()))["kind"] == "stores"


def test_one_head_is_long_and_the_total_stays(tiny: PreTrainedModel) -> None:
    """The long head is what a padded layout would pay for."""
    prompt = random_prompt(tiny, 3, 8, 0)
    scene = Scene(prompt=prompt, context=40, seed=0, peak=PeakMemory(torch.device("cpu")))
    arm = SkewedArm(tiny, scene, 4, kvkeep.Full(), 4)
    arm.begin()
    for layer in arm.cache.managed_layers:
        held = layer.stored.held
        assert held.sum() == 40 * held.size
        assert held.flat[0] >= 4 * 40
        assert np.ptp(held.flat[1:]) == 0
    arm.step()
    arm.cache.check_integrity()


def test_a_skew_that_does_not_fit_is_refused(tiny: PreTrainedModel) -> None:
    """All entries in one head are not yet enough."""
    with pytest.raises(ConfigError, match="cannot hold 9 times the mean"):
        run_stores(
            tiny, kvkeep.VaSEAttnV(budget=32, buffer=16), StoresSettings(batch=2, prompt=8, skew=9, rounds=1)
        )
