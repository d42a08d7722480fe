"""The block gates that come with kvkeep belong to the reasoner that comes with it."""

from __future__ import annotations

import pytest
from transformers import AutoModelForCausalLM

import kvkeep.gates
from kvkeep.engine.spec import model_spec
from kvkeep.evaluation.identity import weights_hashes
from kvkeep.gates import BlockGates
from kvkeep.testbed.shipped import shipped_gates, shipped_model


@pytest.mark.parametrize("name", shipped_gates())
def test_shipped_gates_fit_their_model(name: str) -> None:
    """Trained beside these very weights; small enough to ship."""
    path = shipped_gates()[name]
    model = AutoModelForCausalLM.from_pretrained(shipped_model(name.removesuffix("-blocks")))
    gates = kvkeep.gates.load(path, model_spec(model.config), base_sha256=weights_hashes(model))
    assert isinstance(gates, BlockGates)
    assert gates.base is not None
    assert path.stat().st_size < 1 << 20
