"""Calibration on disk: one safetensors file with a JSON header."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvkeep.calibration.statistics import LayerStatistics, Provenance, Statistics
from kvkeep.core.errors import DataFileError
from kvkeep.core.files import read_tensors, write_tensors
from kvkeep.core.view import Rope
from kvkeep.engine.rotary import rope_of
from kvkeep.engine.spec import model_spec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_KIND = "calibration"
_FORMAT = 1
_FACTS = ("model_type", "heads", "kv_heads", "head_dim", "rope_type")


def save(statistics: Statistics, path: str | os.PathLike[str]) -> None:
    """Write statistics (see :meth:`Statistics.save`)."""
    header = {
        "format": _FORMAT,
        **{name: getattr(statistics, name) for name in _FACTS},
        "layers": sorted(statistics.layers),
        "rope_scaling": statistics.rope.scaling,
        "provenance": asdict(statistics.provenance),
    }
    write_tensors(path, _KIND, tensors_of(statistics), header)


def tensors_of(statistics: Statistics) -> dict[str, Tensor]:
    """The numbers of a calibration, as they stand in a file."""
    layers = [statistics.layers[index] for index in sorted(statistics.layers)]
    means = torch.stack([layer.mean for layer in layers])
    tensors = {
        "mean_real": means.real,
        "mean_imag": means.imag,
        "magnitude": torch.stack([layer.magnitude for layer in layers]),
        "inv_freq": statistics.rope.inv_freq,
    }
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def load(path: str | os.PathLike[str], model: PreTrainedModel | None = None) -> Statistics:
    """Read statistics that :meth:`Statistics.save` wrote.

    Parameters
    ----------
    path
        The file.
    model
        Check right away that the statistics fit this model; :class:`~kvkeep.RetentionCache` checks
        in any case.

    Raises
    ------
    DataFileError
        If the file is missing, truncated, damaged, of another kind or format, or made for another model:
        the message names what differs.
    """
    tensors, header = read_tensors(path, _KIND)
    if header.get("format") != _FORMAT:
        raise DataFileError(
            f"{path} has calibration format {header.get('format')!r}; this version reads {_FORMAT}: "
            "run `kvkeep calibrate` again."
        )
    try:
        statistics = _assemble(tensors, header)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise DataFileError(
            f"{path} is not a whole calibration file ({error!r}): run `kvkeep calibrate` again."
        ) from error
    if model is not None:
        spec = model_spec(model.config)
        reasons = statistics.check(spec, rope_of(model, spec))
        if reasons:
            raise DataFileError(f"{path} does not fit this {spec.model_type!r} model: {'; '.join(reasons)}.")
    return statistics


def _assemble(tensors: dict[str, Tensor], header: dict[str, Any]) -> Statistics:
    facts = {name: header[name] for name in _FACTS}
    shape = (len(header["layers"]), facts["heads"], facts["head_dim"] // 2)
    for name in ("mean_real", "mean_imag", "magnitude"):
        if tuple(tensors[name].shape) != shape:
            raise ValueError(f"{name} has shape {tuple(tensors[name].shape)} where the header says {shape}")
    if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values()):
        raise ValueError("a number is not finite")
    means = torch.complex(tensors["mean_real"], tensors["mean_imag"])
    return Statistics(
        layers={
            int(index): LayerStatistics(mean=mean, magnitude=magnitude)
            for index, mean, magnitude in zip(header["layers"], means, tensors["magnitude"], strict=True)
        },
        rope=Rope(tensors["inv_freq"], float(header["rope_scaling"])),
        provenance=Provenance(**header["provenance"]),
        **facts,
    )
