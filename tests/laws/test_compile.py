"""A compiled forward works with a kvkeep cache, and does not compile anew at every step."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import kvkeep
from kvkeep.testing.models import left_padded, random_gates, tiny_model, tokens
from kvkeep.testing.watching import feed

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model_agrees_and_compiles_a_bounded_number_of_times(family: str) -> None:
    """A guard on a length that changes every step would recompile until torch gives up."""
    torch._dynamo.reset()
    policy = kvkeep.VaSEAttnV(budget=24, buffer=8)
    ids, mask = left_padded((9, 20))
    ids = torch.cat([ids, tokens(2, 61, seed=1)], 1)
    mask = torch.cat([mask, torch.ones(2, 61, dtype=torch.int64)], 1)
    model = tiny_model(family)
    plain = feed(model, kvkeep.RetentionCache(model, policy), ids, mask, [20, *[1] * 60])
    counter = CompileCounter()  # counts graphs and runs them as they are: no C++ compiler is needed
    compiled = torch.compile(model, backend=counter)
    cache = kvkeep.RetentionCache(model, policy)
    # Attention runs outside the graphs, so that each function on the way to it is compiled by itself;
    # the wrapper that transformers puts around several of them counts for all its users together.
    with torch._dynamo.config.patch(recompile_limit=32, fail_on_recompile_limit_hit=True):
        ours = feed(compiled, cache, ids, mask, [20, *[1] * 30])
        graphs = counter.frame_count
        ours += feed(compiled, cache, ids, mask, [1] * 30)
    assert max(float((a - b).abs().max()) for a, b in zip(plain, ours, strict=True)) < 1e-5
    assert cache.trace.evictions >= 6
    assert graphs > 0
    assert counter.frame_count == graphs  # thirty more steps and three more evictions: nothing new


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model_with_gates() -> None:
    """The hook is part of what is compiled: hidden states must reach the gates there too."""
    torch._dynamo.reset()
    policy = kvkeep.DBTrimKV(budget=24, buffer=8)
    ids = tokens(2, 81)  # one more than is read: a mask that is no slice would be another kind of tensor
    mask = torch.ones_like(ids)
    model = tiny_model("llama")
    gates = random_gates(model)
    plain = feed(model, kvkeep.RetentionCache(model, policy, gates=gates), ids, mask, [20, *[1] * 60])
    cache = kvkeep.RetentionCache(model, policy, gates=gates)
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter)
    with torch._dynamo.config.patch(recompile_limit=32, fail_on_recompile_limit_hit=True):
        ours = feed(compiled, cache, ids, mask, [20, *[1] * 30])
        graphs = counter.frame_count
        ours += feed(compiled, cache, ids, mask, [1] * 30)
    assert max(float((a - b).abs().max()) for a, b in zip(plain, ours, strict=True)) < 1e-5
    assert cache.trace.evictions >= 4
    assert counter.frame_count == graphs > 0
