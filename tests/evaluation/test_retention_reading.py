"""The gates' view of a text: what is stored beside the entries is what the gates say of the inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvkeep.core.errors import ConfigError
from kvkeep.engine.tap import attention_modules
from kvkeep.evaluation.retention_reading import read_log_betas
from kvkeep.testing.models import random_gates, tiny_model

IDS = torch.randint(2, 96, (23,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("chunk", [512, 5])
def test_against_hooks_on_the_stock_model(chunk: int) -> None:
    """A plain forward, its attention inputs caught by hooks, and the gates applied by hand."""
    model = tiny_model("llama")
    gates = random_gates(model)
    caught: dict[int, torch.Tensor] = {}

    def catch(layer: int) -> Any:
        def hook(module: Any, args: Any, kwargs: Any) -> None:
            caught[layer] = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]

        return hook

    hooks = [
        modules[0].register_forward_pre_hook(catch(layer), with_kwargs=True)
        for layer, modules in attention_modules(model, (0, 1)).items()
    ]
    with torch.inference_mode():
        model(input_ids=IDS[None])
        wanted = torch.stack([gates(layer, caught[layer])[0] for layer in (0, 1)])
    for hook in hooks:
        hook.remove()
    read: list[int] = []
    found = read_log_betas(model, gates, IDS, chunk=chunk, on_chunk=read.append)
    assert found.shape == (2, 2, 23)
    assert torch.allclose(found, wanted, atol=1e-4)
    assert sum(read) == 23


def test_what_cannot_be_read() -> None:
    """Nothing, and more than the model has positions."""
    model = tiny_model("llama")
    with pytest.raises(ConfigError, match="no token to look at"):
        read_log_betas(model, random_gates(model), IDS[:0])
    with pytest.raises(ConfigError, match="longer than the model's 512 positions"):
        read_log_betas(model, random_gates(model), IDS.repeat(40))
