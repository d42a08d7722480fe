"""Ways of calling the model that the cache must not notice, and one that it must refuse."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor

import kvkeep
from kvkeep.core.errors import CacheError
from kvkeep.core.policy import Policy
from kvkeep.engine.generation import cache_argument
from kvkeep.testing.models import left_padded, tiny_model, tokens
from kvkeep.testing.watching import feed

pytestmark = pytest.mark.usefixtures("either_store")

POLICIES: dict[str, Policy] = {
    "vase-attnv": kvkeep.VaSEAttnV(budget=24, buffer=8),
    "h2o": kvkeep.H2O(budget=24, buffer=8),
    "expected-attention": kvkeep.ExpectedAttention(budget=24, buffer=8),
}
IDS = tokens(1, 70)


def steps(model: Any, cache: kvkeep.RetentionCache, mode: AbstractContextManager[Any], *ends: int) -> Tensor:
    """Forwards up to each end, under a mode of autograd; the last logits."""
    for end in ends:
        with mode:
            part = IDS[:, cache.get_seq_length() : end]
            output = model(
                part, attention_mask=torch.ones_like(IDS[:, :end]), **{cache_argument(model): cache}
            )
    return output.logits[0, -1]


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_forward_that_records_gradients_stores_none(policy: Policy) -> None:
    """Without no_grad every step would keep all earlier ones alive: memory grows, bounded entries or not."""
    model = tiny_model()
    cache = kvkeep.RetentionCache(model, policy)
    logits = steps(model, cache, torch.enable_grad(), 30, *range(31, 60))
    assert logits.requires_grad
    for layer in cache.managed_layers:
        held = [*layer.stored.memory.tensors().values()]
        held += [layer.recorder.ring.queries] if layer.recorder.ring else []
        held += [layer.recorder.sums.total, layer.recorder.sums.outer] if layer.recorder.sums else []
        assert not any(tensor.requires_grad for tensor in held)
    assert cache.trace.evictions >= 3


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_cache_moves_between_inference_mode_and_no_grad(policy: Policy) -> None:
    """A server answers the first turn in inference mode and the second in `generate`'s no_grad."""
    model = tiny_model()
    plain = kvkeep.RetentionCache(model, policy)
    ends = (20, *range(21, 60))
    expected = steps(model, plain, torch.no_grad(), *ends)
    mixed = kvkeep.RetentionCache(model, policy)
    steps(model, mixed, torch.inference_mode(), *ends[:16])
    with torch.inference_mode():
        mixed.reorder_cache(torch.tensor([0]))
    steps(model, mixed, torch.no_grad(), *ends[16:25])
    steps(model, mixed, torch.inference_mode(), *ends[25:35])
    assert torch.equal(steps(model, mixed, torch.no_grad(), *ends[35:]), expected)
    assert mixed.trace.evictions == plain.trace.evictions >= 3


def test_one_policy_and_one_model_serve_several_threads() -> None:
    """A server shares both; each request has its own cache."""
    model, policy = tiny_model(dtype=torch.float64), POLICIES["vase-attnv"]
    kvkeep.prepare(model)

    def answer(seed: int) -> Tensor:
        inputs = {"input_ids": tokens(1, 30, seed=seed)}
        return kvkeep.generate(model, policy, inputs, max_new_tokens=20, do_sample=False)[0]

    expected = [answer(seed) for seed in range(3)]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(answer, [0, 1, 2, 2, 1, 0]))
    for ours, theirs in zip(found, [*expected, *reversed(expected)], strict=True):
        assert torch.equal(ours, theirs)


def test_embeddings_serve_as_well_as_ids() -> None:
    """Multimodal pipelines and soft prompts pass embeddings."""
    model, policy = tiny_model(dtype=torch.float64), POLICIES["vase-attnv"]
    ids, mask = left_padded((9, 30))
    options = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False}
    by_ids, by_embeddings = (kvkeep.RetentionCache(model, policy) for _ in range(2))
    expected = model.generate(ids, **options, **{cache_argument(model): by_ids})
    embeddings = model.get_input_embeddings()(ids).detach()
    found = model.generate(inputs_embeds=embeddings, **options, **{cache_argument(model): by_embeddings})
    assert torch.equal(found, expected[:, 30:])


def test_attention_weights_speak_of_stored_entries() -> None:
    """`output_attentions` shows what was attended to: one column per entry, in the order of positions."""
    model = tiny_model(attention="eager")
    cache = kvkeep.RetentionCache(model, POLICIES["vase-attnv"])
    widths = []
    for end in (30, 31, 32, 33):
        output = model(
            IDS[:, cache.get_seq_length() : end], output_attentions=True, **{cache_argument(model): cache}
        )
        widths.append(output.attentions[1].shape[-1])
        torch.testing.assert_close(output.attentions[1].sum(-1), torch.ones(1, 4, output.logits.shape[1]))
    assert widths == [30, 31, 32, 25]


def test_a_copied_cache_goes_its_own_way() -> None:
    """Two continuations of one conversation start from a copy of its cache."""
    model = tiny_model()
    first = kvkeep.RetentionCache(model, POLICIES["vase-attnv"])
    steps(model, first, torch.no_grad(), 30, 31)
    second = copy.deepcopy(first)
    expected = steps(model, first, torch.no_grad(), *range(32, 60))
    assert second.get_seq_length() == 31
    assert torch.equal(steps(model, second, torch.no_grad(), *range(32, 60)), expected)


def test_a_prompt_no_longer_than_the_past_is_refused() -> None:
    """The commonest misuse: a cache that is full of one conversation is passed to another."""
    model = tiny_model()
    cache = kvkeep.RetentionCache(model, POLICIES["vase-attnv"])
    feed(model, cache, IDS, torch.ones_like(IDS), [40])
    ids = tokens(1, 10, seed=4)
    with pytest.raises(CacheError, match=r"has seen 40 columns.*an empty cache for a new one"):
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, **{cache_argument(model): cache}
        )
