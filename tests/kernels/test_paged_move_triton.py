"""The Triton kernels that move entries against their torch twins: interpreted, and compiled without a GPU.

The interpreter runs a program's lines in order for whole blocks, so it proves the arithmetic of addresses and
masks. That no thread stores before another has read is not for it to see; the compiled code is looked at.
"""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvkeep.kernels import paged_move
from tests.kernels.paged_cases import Shape, assert_same_bits, case

pytest.importorskip("triton", reason="triton is not installed (kvkeep[dev] installs it on Linux x86_64)")

KERNELS = {
    "append_kernel": ("planes slots columns total heads new", 8),
    "gather_kernel": ("planes table held width entries page_size", 8),
    "move_kernel": ("planes table lengths indices width entries page_size", 16),
}
TYPES = {"planes": "*i64", "indices": "*i64"} | dict.fromkeys(
    ("slots", "columns", "table", "held", "lengths"), "*i32"
)


def _load(interpreted: bool) -> ModuleType:
    """The module of kernels once more, decorated for the interpreter or for the compiler.

    Triton asks the variable when a function is decorated: what others have imported stays as it is.
    """
    spec = importlib.util.find_spec("kvkeep.kernels.paged_move_triton")
    assert spec is not None
    assert spec.origin is not None
    again = importlib.util.spec_from_file_location(
        "_interpreted" if interpreted else "_compiled", spec.origin
    )
    assert again is not None
    assert again.loader is not None
    module = importlib.util.module_from_spec(again)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1" if interpreted else "0")
        again.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    """Interpreted kernels, which take tensors of the CPU."""
    return _load(interpreted=True)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Tiny tables with empty heads and sizes that divide nothing."""
    heads = draw(st.integers(1, 3))
    row = st.tuples(*[st.integers(0, 7)] * heads)
    return Shape(
        held=tuple(draw(st.lists(row, min_size=1, max_size=2))),
        page_size=draw(st.sampled_from([1, 3, 16])),
        key_dim=draw(st.integers(1, 6)),
        value_dim=draw(st.integers(1, 6)),
        extras=draw(st.integers(0, 2)),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        seed=draw(st.integers(0, 99)),
    )


# More entries than a program takes at once, and more words than fit its width.
LONG = Shape(held=((50, 0), (37, 49)), page_size=3, key_dim=150, value_dim=3)
few = settings(max_examples=25, deadline=None, derandomize=True)


@few
@given(shape=shapes())
@example(shape=LONG)
@example(shape=Shape(held=((64,),), page_size=1, dtype=torch.bfloat16))
def test_move_agrees_with_its_twin(kernels: ModuleType, shape: Shape) -> None:
    """In place: every entry is read before its slot gets another."""
    some = case(shape)
    twin = some.copy()
    indices, counts = some.kept()
    kernels.move(some.pool, some.table, indices, counts, shape.page_size)
    paged_move.move_torch(twin, some.table, indices, counts, shape.page_size)
    assert_same_bits(some.pool, twin)


@few
@given(shape=shapes(), more=st.integers(0, 2))
@example(shape=LONG, more=0)
def test_gather_agrees_with_its_twin(kernels: ModuleType, shape: Shape, more: int) -> None:
    """Also where nothing is stored, and for some of the pool's tensors only."""
    some = case(shape)
    entries = int(some.held.max()) + more
    for pool in (some.pool, {"values": some.pool["values"]}):
        ours = kernels.gather(pool, some.table, some.held, entries, shape.page_size)
        twin = paged_move.gather_torch(pool, some.table, some.held, entries, shape.page_size)
        assert_same_bits(ours, twin)


@few
@given(shape=shapes(), new=st.integers(1, 3), transposed=st.booleans())
@example(shape=LONG, new=3, transposed=True)
def test_append_agrees_with_its_twin(kernels: ModuleType, shape: Shape, new: int, transposed: bool) -> None:
    """Padding, views whose heads lie apart, positions in 64 bits that all heads share, extras left out."""
    some = case(shape)
    twin = some.copy()
    given_entries, slots, columns = some.fresh(new, transposed)
    kernels.append(some.pool, given_entries, slots, columns)
    paged_move.append_torch(twin, given_entries, slots, columns)
    assert_same_bits(some.pool, twin)


def test_keys_with_gaps_between_channels_are_read_right(kernels: ModuleType) -> None:
    """A view such as every second channel is not one piece of memory."""
    some = case(Shape(held=((4,),), dtype=torch.bfloat16))
    twin = some.copy()
    given_entries, slots, _ = some.fresh(2, transposed=True)
    wide = torch.randn(1, 1, 2, 2 * some.shape.key_dim).bfloat16()
    given_entries |= {"keys": wide[..., ::2], "values": torch.randn(1, 1, 2, 7).bfloat16()[..., 1:6]}
    kernels.append(some.pool, given_entries, slots, None)
    paged_move.append_torch(twin, given_entries, slots, None)
    assert_same_bits(some.pool, twin)


def test_other_types_are_refused_as_by_the_twin(kernels: ModuleType) -> None:
    """Half the bits of a float32 copied as if they were a bfloat16 would be garbage."""
    some = case(Shape(held=((4,),), dtype=torch.bfloat16))
    given_entries, slots, _ = some.fresh(1, transposed=True)
    given_entries["keys"] = given_entries["keys"].float()
    with pytest.raises(TypeError, match="convert"):
        kernels.append(some.pool, given_entries, slots, None)
    with pytest.raises(RuntimeError):
        paged_move.append_torch(some.pool, given_entries, slots, None)


def test_the_interpreter_stays_in_here(kernels: ModuleType) -> None:
    """The variable is unset again, and the trial that decides about Triton passes on what was loaded."""
    kernels.try_out(torch.device("cpu"))
    assert "TRITON_INTERPRET" not in os.environ
    assert type(kernels.move_kernel) is not type(_load(interpreted=False).move_kernel)


def _compiled(name: str, word: Any, capability: int) -> dict[str, Any]:
    """Code of a kernel for a CUDA device that is not here."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(_load(interpreted=False), name)
    arguments, rows = KERNELS[name]
    fixed = {"WORD": word, "ROWS": rows, "COLS": 64}
    signature = {each: TYPES.get(each, "i32") for each in arguments.split()} | dict.fromkeys(
        fixed, "constexpr"
    )
    values = {(kernel.arg_names.index(each),): value for each, value in fixed.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values)
    return dict(triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("capability", "word"), [(80, "int16"), (90, "int32")])
def test_kernels_compile_for_a_gpu(
    name: str, capability: int, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter takes much that the compiler refuses. A barrier parts reading from writing."""
    import triton.language as tl

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # 3.9 warns where it is unset
    code = _compiled(name, getattr(tl, word), capability)
    assert len(code["cubin"]) > 0
    steps = re.findall(r"ld\.global|st\.global|bar\.sync", code["ptx"])
    assert "st.global" in steps
    if name == "move_kernel":
        barrier = steps.index("bar.sync")
        assert "st.global" not in steps[:barrier]
        assert steps[barrier + 1] == "st.global"


def test_sizes_are_those_that_are_compiled_here(kernels: ModuleType) -> None:
    """Else the barrier would be looked for in code that nobody runs."""
    planes = np.array([[0, 0, 64, 64, 0, 0, 0]])
    assert kernels._shape(planes, 4, kernels._MOVED)["ROWS"] == KERNELS["move_kernel"][1]
    assert kernels._shape(planes, 4, kernels._COPIED)["ROWS"] == KERNELS["append_kernel"][1]
