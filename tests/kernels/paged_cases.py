"""Pools with random bits, random tables and what moves in them: cases for the kernels that move entries."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvkeep.core.arrays import IntArray

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class Shape:
    """Sizes of a case."""

    held: tuple[tuple[int, ...], ...]
    page_size: int = 3
    key_dim: int = 3
    value_dim: int = 5
    extras: int = 1
    dtype: torch.dtype = torch.float32
    seed: int = 0


@dataclass(frozen=True)
class Case:
    """A pool, page 0 zeros and all else random bits, and tables that name shuffled pages."""

    shape: Shape
    pool: dict[str, Tensor]
    table: IntArray
    held: IntArray
    random: np.random.Generator

    def copy(self) -> dict[str, Tensor]:
        """The pool once more."""
        return {name: tensor.clone() for name, tensor in self.pool.items()}

    def kept(self) -> tuple[Tensor, IntArray]:
        """Some places of every head, ascending, and how many; nonsense behind."""
        counts = self.random.integers(0, self.held + 1)
        indices = self.random.integers(-9, 10**6, (*counts.shape, int(counts.max(initial=0))))
        for where in np.ndindex(*counts.shape):
            chosen = self.random.choice(self.held[where], counts[where], replace=False)
            indices[where][: counts[where]] = np.sort(chosen)
        return torch.from_numpy(indices).to(self.pool["keys"].device), counts

    def fresh(self, new: int, transposed: bool) -> tuple[dict[str, Tensor], IntArray, IntArray | None]:
        """Entries ``[rows, heads, new, ...]``, slots for some, and which; the last extra is not given."""
        rows, heads = self.held.shape
        given = {}
        for name, tensor in list(self.pool.items())[: -1 if self.shape.extras else None]:
            order = (rows, new, heads) if transposed else (rows, heads, new)
            given[name] = random_bits((*order, *tensor.shape[1:]), tensor.dtype, self.random).to(
                tensor.device
            )
            given[name] = given[name].transpose(1, 2) if transposed else given[name]
        position = torch.from_numpy(self.random.integers(0, 2**31, (rows, 1, new)))
        given["positions"] = position.to(self.pool["keys"].device).expand(-1, heads, -1)
        total, free = rows * heads * new, len(self.pool["keys"]) - self.shape.page_size
        count = min(free, total if transposed else int(self.random.integers(0, total + 1)))
        slots = self.random.permutation(free)[:count] + self.shape.page_size
        every = count == total
        return given, slots, None if every else np.sort(self.random.permutation(total)[:count])


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, random: np.random.Generator) -> Tensor:
    """Any bits at all, NaN of every kind among them."""
    width = torch.empty(0, dtype=dtype).element_size()
    raw = random.integers(0, 256, (*shape[:-1], shape[-1] * width), np.uint8)
    return torch.from_numpy(raw).view(dtype)


def case(shape: Shape, device: str = "cpu") -> Case:
    """The case of these sizes."""
    random, held = np.random.default_rng(shape.seed), np.array(shape.held)
    counts = -(-held // shape.page_size)
    pages = int(counts.sum()) + 3
    table = np.zeros((*held.shape, int(counts.max(initial=0))), np.int32)
    table[np.arange(table.shape[2]) < counts[..., None]] = random.permutation(pages - 1)[: counts.sum()] + 1
    sizes = {"keys": (shape.key_dim, shape.dtype), "values": (shape.value_dim, shape.dtype)}
    sizes |= {"positions": (1, torch.int32)} | {f"extra.{n}": (1, torch.float32) for n in range(shape.extras)}
    pool = {}
    for name, (dim, dtype) in sizes.items():
        tensor = random_bits((pages * shape.page_size, dim), dtype, random)
        tensor[: shape.page_size] = 0
        pool[name] = (tensor if name in ("keys", "values") else tensor[:, 0].contiguous()).to(device)
    return Case(shape, pool, table, held, random)


def assert_same_bits(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """NaN equals itself here, and zero does not equal minus zero."""
    assert list(ours) == list(theirs)
    for name, tensor in ours.items():
        assert tensor.shape == theirs[name].shape
        assert tensor.dtype == theirs[name].dtype
        bits = BITS[tensor.element_size()]
        assert torch.equal(tensor.view(bits), theirs[name].view(bits)), name
