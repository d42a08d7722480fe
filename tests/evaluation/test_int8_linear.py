"""The int8 layers of scripts/int8_linear.py, on which results with a real model rest."""

import runpy
from pathlib import Path

import torch
from torch import nn

SCRIPT = Path(__file__).parents[2] / "scripts" / "int8_linear.py"


def layers() -> tuple[nn.Linear, nn.Module]:
    """The same layer in float32 and int8."""
    torch.manual_seed(0)
    exact = nn.Linear(96, 40)
    return exact, runpy.run_path(str(SCRIPT))["Int8Linear"](exact)


def test_a_token_with_large_activations_does_not_round_the_others_away() -> None:
    """Otherwise the first token of a prompt, which is huge, would damage all texts of a batch."""
    exact, int8 = layers()
    rows = torch.randn(2, 5, 96)
    rows[0, 0] *= 1000
    wanted, found = exact(rows), int8(rows)
    error = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert found.shape == wanted.shape
    assert 0 < error.max() < 0.05


def test_a_row_does_not_depend_on_its_batch() -> None:
    """Otherwise a text would change with its neighbours, and arms would differ by more than their policy."""
    _, int8 = layers()
    rows = torch.randn(7, 96) * torch.logspace(-3, 3, 7)[:, None]
    assert torch.equal(int8(rows)[3:4], int8(rows[3:4]))


def test_every_linear_layer_of_a_model_is_replaced() -> None:
    """Otherwise the header would claim int8 for layers that are not."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ModuleList([nn.Linear(8, 4, bias=False), nn.LayerNorm(4)]))
    assert runpy.run_path(str(SCRIPT))["to_int8"](model) == 2
    assert not [each for each in model.modules() if isinstance(each, nn.Linear)]
