"""Calibration files: what is written comes back, and what is not right is explained."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import kvkeep
from kvkeep.calibration import LayerStatistics, Provenance, Statistics, load
from kvkeep.core.errors import DataFileError
from kvkeep.core.files import tensor_digest
from kvkeep.core.view import Rope
from tests.calibration.test_capture import IDS, MODELS


def make_statistics(**changes: Any) -> Statistics:
    torch.manual_seed(0)
    mean = torch.randn(2, 4, 4, dtype=torch.complex64)
    layers = {
        index: LayerStatistics(mean=mean[index], magnitude=mean[index].abs() + 0.1) for index in range(2)
    }
    provenance = Provenance(
        model="tiny", tokens=100, text_sha256="ab", created="2026-01-01T00:00:00+00:00", kvkeep_version="0"
    )
    made = Statistics(
        layers=layers,
        model_type="llama",
        heads=4,
        kv_heads=2,
        head_dim=8,
        rope_type="default",
        rope=Rope(10000.0 ** (-torch.arange(4) / 4.0)),
        provenance=provenance,
    )
    return dataclasses.replace(made, **changes)


def test_round_trip(tmp_path: Path) -> None:
    """A calibration read back would score otherwise than the one that was measured."""
    made = make_statistics(layers={5: make_statistics().layers[0], 11: make_statistics().layers[1]})
    made.save(tmp_path / "a.safetensors")
    read = load(tmp_path / "a.safetensors")
    assert list(read.layers) == [5, 11]
    for index, layer in made.layers.items():
        assert torch.equal(read.layers[index].mean, layer.mean)
        assert torch.equal(read.layers[index].magnitude, layer.magnitude)
    assert torch.equal(read.rope.inv_freq, made.rope.inv_freq)
    names = ("model_type", "heads", "kv_heads", "head_dim", "rope_type", "provenance")
    assert [getattr(read, name) for name in names] == [getattr(made, name) for name in names]
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


def test_the_hash_is_that_of_the_numbers_wherever_they_are(tmp_path: Path) -> None:
    """A run names the calibration it used by this hash; the file must be found by it, and no other."""
    made = make_statistics()
    made.save(tmp_path / "a.safetensors")
    with safe_open(tmp_path / "a.safetensors", framework="pt") as file:
        header = json.loads(file.metadata()["kvkeep"])
    assert made.sha256 == load(tmp_path / "a.safetensors").sha256 == header["sha256"]
    other = dataclasses.replace(made.layers[0], magnitude=made.layers[0].magnitude + 1e-6)
    assert make_statistics(layers={0: other, 1: made.layers[1]}).sha256 != made.sha256


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted calibration would destroy the one that worked."""
    path = tmp_path / "a.safetensors"
    make_statistics().save(path)
    before = path.read_bytes()

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("kvkeep.core.files.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        make_statistics(heads=8).save(path)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["a.safetensors"]


def test_missing_files_and_folders(tmp_path: Path) -> None:
    """A typo in a path would end in a traceback."""
    with pytest.raises(DataFileError, match="no calibration file at"):
        load(tmp_path / "nowhere.safetensors")
    with pytest.raises(DataFileError, match="does not exist"):
        make_statistics().save(tmp_path / "no" / "folder.safetensors")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.9, 0.999])
def test_truncated_files(tmp_path: Path, share: float) -> None:
    """Half a download would be read as a calibration, or end in a traceback."""
    path = tmp_path / "a.safetensors"
    make_statistics().save(path)
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(DataFileError, match="damaged or truncated"):
        load(path)


def rewrite(path: Path, header: dict[str, Any], tensors: dict[str, torch.Tensor | None]) -> None:
    """Change what a saved file holds; None removes."""
    with safe_open(path, framework="pt") as file:
        facts = json.loads(file.metadata()["kvkeep"]) | header
        stored = {name: file.get_tensor(name) for name in file.keys()} | tensors  # noqa: SIM118
    facts = {name: value for name, value in facts.items() if value is not None}
    whole = {name: tensor for name, tensor in stored.items() if tensor is not None}
    facts["sha256"] = tensor_digest(whole)  # what is wrong here is not damage on the way
    save_file(whole, path, metadata={"kvkeep": json.dumps(facts)})


@pytest.mark.parametrize(
    ("header", "tensors", "message"),
    [
        ({"kind": "cache"}, {}, "is 'cache', not a calibration file"),
        ({"format": 99}, {}, "format 99"),
        ({"head_dim": None}, {}, "head_dim"),
        ({"head_dim": 16}, {}, "shape"),
        ({"layers": [0]}, {}, "shape"),
        ({"provenance": {"model": "x"}}, {}, "whole calibration"),
        ({}, {"magnitude": None}, "magnitude"),
        ({}, {"magnitude": torch.full((2, 4, 4), float("nan"))}, "finite"),
        ({}, {"mean_imag": torch.zeros(1)}, "whole calibration"),
    ],
)
def test_damaged_contents(
    tmp_path: Path, header: dict[str, Any], tensors: dict[str, Any], message: str
) -> None:
    """A file that is not what it seems would fail at the first eviction, hours later."""
    path = tmp_path / "a.safetensors"
    make_statistics().save(path)
    rewrite(path, header, tensors)
    with pytest.raises(DataFileError, match=message):
        load(path)


def test_other_files_are_not_calibrations(tmp_path: Path) -> None:
    """A model's weights would be taken for a calibration."""
    save_file({"weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(DataFileError, match="not a calibration file"):
        load(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "qwen3"}, "model type qwen3, here llama"),
        ({"heads": 8}, "query heads 8, here 4"),
        ({"kv_heads": 4}, "KV heads 4, here 2"),
        ({"head_dim": 16}, "head_dim 16, here 8"),
        ({"layers": make_statistics().layers | {2: make_statistics().layers[0]}}, "layers 0-2, here 0, 1"),
        ({"rope_type": "yarn"}, "rope type yarn, here default"),
        ({"rope": Rope(torch.ones(2))}, "rotating channels 4, here 8"),
        (
            {"rope": Rope(10000.0 ** (-torch.arange(4) / 4.0) + 2e-5)},
            "frequencies that differ by up to 2e-05",
        ),
        ({"rope": Rope(10000.0 ** (-torch.arange(4) / 4.0), 1.1)}, "scaling 1.1, here 1"),
    ],
)
def test_other_models_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    """Scores would be made of another model's queries, and nobody would notice."""
    model = MODELS["llama"][0]()
    path = tmp_path / "a.safetensors"
    fitting = make_statistics()
    fitting.save(path)
    assert load(path, model).heads == 4
    other = make_statistics(**changes)
    if "head_dim" in changes or "heads" in changes:
        spec, rope = kvkeep.engine.spec.model_spec(model.config), fitting.rope
        assert any(message in reason for reason in other.check(spec, rope))
        return
    other.save(path)
    with pytest.raises(DataFileError, match=message):
        load(path, model)


def test_a_saved_calibration_decides_like_the_captured_one(tmp_path: Path) -> None:
    """A generation with the file would differ from one with the fresh capture."""
    model = MODELS["qwen3"][0]()
    captured = kvkeep.calibration.capture(model, IDS)
    captured.save(tmp_path / "a.safetensors")
    kept = []
    for statistics in (captured, load(tmp_path / "a.safetensors", model)):
        inputs = {"input_ids": IDS[None, :10], "attention_mask": torch.ones(1, 10, dtype=torch.int64)}
        policy = kvkeep.TriAttention(budget=16, buffer=4)
        _, cache = kvkeep.generate(
            model, policy, inputs, max_new_tokens=30, do_sample=False, calibration=statistics
        )
        kept.append([head.tolist() for head in cache.kept_positions(1)[0]])
    assert kept[0] == kept[1]
