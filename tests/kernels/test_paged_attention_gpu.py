"""What flashinfer is asked for: the plan describes the pool. (The kernel itself needs a GPU.)"""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch

from kvkeep.kernels import paged_attention_gpu
from kvkeep.kernels.paged_attention import paged_attention, paged_attention_torch
from kvkeep.kernels.paged_attention_gpu import csr


def test_the_plan_names_the_same_entries() -> None:
    """Following the plan by hand gives what the twin gives from the table."""
    generator = torch.Generator().manual_seed(0)
    lens, size = np.array([9, 4, 1]), 4
    table = np.array([[5, 2, 7], [3, 0, 0], [1, 0, 0]], np.int32)
    keys, values = torch.randn(2, 8, size, 6, generator=generator, dtype=torch.float64)
    query = torch.randn(3, 2, 6, generator=generator, dtype=torch.float64)
    begins, pages, last = csr(table, lens, size)
    assert begins.tolist() == [0, 3, 4, 5]
    assert pages.tolist() == [5, 2, 7, 3, 1]
    assert last.tolist() == [1, 4, 1]
    assert {each.dtype for each in (begins, pages, last)} == {torch.int32}
    expected = paged_attention_torch(query, keys, values, table, lens, 0.4)
    for sequence in range(3):
        mine = pages[begins[sequence] : begins[sequence + 1]]
        held = (len(mine) - 1) * size + int(last[sequence])
        k, v = (each[mine].flatten(0, 1)[:held] for each in (keys, values))
        shares = (query[sequence] @ k.T * 0.4).softmax(-1)
        torch.testing.assert_close(shares @ v, expected[sequence])


needs_flashinfer = pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("flashinfer") is None,
    reason="there is no CUDA device, or flashinfer is not installed",
)


@pytest.mark.gpu
@needs_flashinfer
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_flashinfer_agrees_with_the_twin(group: int, dim: int) -> None:
    """On a GPU: bfloat16 against the twin in float32."""
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 40, 32, dim, generator=generator).cuda().bfloat16()
    query = torch.randn(4, group, dim, generator=generator).cuda().bfloat16()
    lens = np.array([300, 1, 64, 33])
    table = np.zeros((4, 10), np.int32)
    table[0], table[1, 0], table[2, :2], table[3, :2] = np.arange(1, 11), 11, (12, 13), (14, 15)
    assert paged_attention_gpu.can_attend(query, values)
    ours = paged_attention(query, keys, values, table, lens, 0.125)
    twin = paged_attention_torch(query.float(), keys.float(), values.float(), table, lens, 0.125)
    torch.testing.assert_close(ours.float(), twin, atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
@needs_flashinfer
def test_many_layers_each_with_a_plan_and_a_busy_device() -> None:
    """The host plans layers ahead while the device works: no plan may be overwritten before it was copied."""
    random = np.random.default_rng(0)
    keys, values = torch.randn(2, 600, 32, 64, device="cuda", dtype=torch.bfloat16)
    query = torch.randn(8, 4, 64, device="cuda", dtype=torch.bfloat16)
    busy = torch.randn(4096, 4096, device="cuda")
    layers = [
        (random.permutation(599)[:96].reshape(8, 12) + 1, random.integers(1, 385, 8)) for _ in range(32)
    ]
    outputs = []
    for table, lens in layers:
        busy = busy @ busy / 64
        outputs.append(paged_attention(query, keys, values, table.astype(np.int32), lens, 0.125))
    for output, (table, lens) in zip(outputs, layers, strict=True):
        twin = paged_attention_torch(query.float(), keys.float(), values.float(), table, lens, 0.125)
        torch.testing.assert_close(output.float(), twin, atol=2e-2, rtol=2e-2)
