"""Who produced a result: weights by hash, software by version, machine by name."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import kvkeep
from kvkeep.core.budget import Budget
from kvkeep.core.policy import Policy

_PACKAGES = ("torch", "transformers", "tokenizers", "math-verify")


def weights_sha256(model: torch.nn.Module, dtype: torch.dtype | None = None) -> str:
    """sha256 over names, types, shapes and bytes of all weights, however they were stored in files.

    Parameters
    ----------
    dtype
        Hash the weights as this type; ``None``: as they are.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        flat = tensor.detach().contiguous().cpu().reshape(-1)
        if flat.numel():
            digest.update(memoryview(flat.view(torch.uint8).numpy()))
    return digest.hexdigest()


def weights_hashes(model: torch.nn.Module) -> Iterator[str]:
    """The hashes that a model may be known by, one by one: of its weights as loaded, then as other types.

    Weights published in bfloat16 are the same model when they are loaded as float32, and the other way round.
    """
    yield weights_sha256(model)
    loaded = next(model.parameters()).dtype
    for dtype in (torch.float32, torch.bfloat16):
        if dtype != loaded:
            yield weights_sha256(model, dtype)


def versions() -> dict[str, str]:
    """Software that can change a result."""
    found = {"kvkeep": kvkeep.__version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def hardware() -> dict[str, Any]:
    """The machine, as far as it can be asked."""
    facts: dict[str, Any] = {
        "machine": platform.machine(),
        "system": platform.system(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        facts["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return facts


def git_revision() -> str | None:
    """The commit that kvkeep runs from, ``None`` for an installed package."""
    root = Path(kvkeep.__file__).parents[2]
    if not (root / ".git").exists():
        return None
    try:
        asked = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return asked.stdout.strip() or None


def plain(value: Any) -> Any:
    """Settings of a policy as JSON-ready values: budgets and policies inside them are written out."""
    if isinstance(value, Policy):
        return {"name": value.name, **plain(value.options())}
    if isinstance(value, Budget):
        return {"entries": value.entries, "prompt": value.prompt}
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value
