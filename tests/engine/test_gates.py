"""Gates in a cache: what they read, what is stored of it, and that the model is left as it was."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

import kvkeep
from kvkeep.core.errors import CacheError, ConfigError, DataFileError, UnsupportedError
from kvkeep.core.policy import Policy
from kvkeep.engine.attention import restore
from kvkeep.engine.generation import cache_argument
from kvkeep.engine.spec import model_spec
from kvkeep.engine.tap import attention_modules, tap
from kvkeep.gates import RetentionGates
from kvkeep.testing.models import FAMILIES, left_padded, random_gates, tiny_model, tokens
from kvkeep.testing.oracle import oracle_gap, replay
from kvkeep.testing.watching import WatchedCache, feed

POLICIES: dict[str, Policy] = {
    "trimkv": kvkeep.TrimKV(budget=24, buffer=8),
    "dbtrimkv": kvkeep.DBTrimKV(budget=24, buffer=8),
    "dbtrimkv, looking ahead": kvkeep.DBTrimKV(budget=24, buffer=8, ahead=16, floor=2),
    "dbtrimkv, threshold": kvkeep.DBTrimKV(budget=24, buffer=8, threshold=0.05),
    "trimkv, pyramid": kvkeep.policy("trimkv + pyramid(beta=4)", budget=24, buffer=8),
}


def pre_hooks(model: nn.Module) -> int:
    """Forward pre-hooks anywhere in a model."""
    return sum(len(module._forward_pre_hooks) for module in model.modules())


def inputs_of_attention(model: PreTrainedModel, run: Callable[[], Any]) -> dict[int, Tensor]:
    """What enters each attention module while ``run`` runs, concatenated over its forwards."""
    seen: dict[int, list[Tensor]] = {}
    hooks = [
        module.register_forward_pre_hook(
            lambda module, args, kwargs: seen.setdefault(module.layer_idx, []).append(
                kwargs["hidden_states"]
            ),
            with_kwargs=True,
        )
        for modules in attention_modules(model, range(9)).values()
        for module in modules
    ]
    run()
    for hook in hooks:
        hook.remove()
    return {layer: torch.cat(found, dim=1) for layer, found in seen.items()}


def stored_retention(cache: kvkeep.RetentionCache, layer: int) -> list[list[dict[int, float]]]:
    """Log beta by position, ``[row][head]``."""
    cache.layers[layer].settle()
    store = cache.layers[layer].store
    found = store.padded(None, "positions", "extra.log_retention")
    return [
        [
            dict(zip(p[:n].tolist(), v[:n].tolist(), strict=True))
            for p, v, n in zip(positions, values, lens, strict=True)
        ]
        for positions, values, lens in zip(
            found["positions"], found["extra.log_retention"], store.held.tolist(), strict=True
        )
    ]


@pytest.mark.parametrize("store", ["dense", "paged"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt-oss", "qwen2.5-vl"])
def test_what_is_stored_is_what_the_gates_say_of_the_input(family: str, store: Any) -> None:
    """Rows with padding, a prompt in chunks, single tokens, evictions: each entry keeps its own log beta."""
    model, gates = tiny_model(family), random_gates(tiny_model(family))
    policy = kvkeep.TrimKV(budget=24, buffer=8)
    cache = kvkeep.RetentionCache(model, policy, gates=gates, store=store)
    ids, mask = left_padded((30, 11, 24))
    ids = torch.cat([ids, tokens(3, 20, seed=1)], dim=1)
    mask = torch.cat([mask, torch.ones(3, 20, dtype=mask.dtype)], dim=1)
    hidden = inputs_of_attention(model, lambda: feed(model, cache, ids, mask, [16, 14, *[1] * 20]))
    assert cache.trace.evictions > 0
    for layer in cache.spec.managed:
        expected = gates(layer, hidden[layer])
        for row, heads in enumerate(stored_retention(cache, layer)):
            columns = mask[row].nonzero()[:, 0].tolist()
            for head, found in enumerate(heads):
                assert found
                for position, value in found.items():
                    assert value == pytest.approx(float(expected[row, head, columns[position]]), abs=1e-6)


@pytest.mark.parametrize("store", ["dense", "paged"])
def test_decoded_tokens_are_gated_together(store: Any) -> None:
    """A gate is a read of its weights: sixteen tokens share one, and none is forgotten or mixed up."""
    model, gates, asked = tiny_model("llama"), random_gates(tiny_model("llama")), []
    cache = kvkeep.RetentionCache(model, kvkeep.TrimKV(budget=100), gates=gates, store=store)
    gates.register_forward_pre_hook(lambda module, args: asked.append((args[0], args[1].shape[1])))
    ids, mask = left_padded((9, 4))
    ids = torch.cat([ids, tokens(2, 45, seed=1)], dim=1)
    mask = torch.cat([mask, torch.ones(2, 45, dtype=mask.dtype)], dim=1)
    lengths = [9, *[1] * 18, 2, *[1] * 25]
    with torch.inference_mode():
        hidden = inputs_of_attention(model, lambda: feed(model, cache, ids, mask, lengths))
    assert [count for layer, count in asked if layer == 1] == [9, 16, 2, 2, 16]
    waiting = sum(layer.deferred.nbytes for layer in cache.managed_layers)
    assert waiting == 2 * 9 * 2 * 64 * 4
    before = cache.trace.metadata_bytes
    cache.reorder_cache(torch.tensor([1, 0]))
    assert asked[-1] == (1, 9)
    assert cache.trace.metadata_bytes == before - waiting
    for layer in cache.spec.managed:
        expected = gates(layer, hidden[layer])
        for place, row in enumerate((1, 0)):
            columns = mask[row].nonzero()[:, 0].tolist()
            for head, found in enumerate(stored_retention(cache, layer)[place]):
                wanted = expected[row, head, columns].tolist()
                assert found == pytest.approx(dict(enumerate(wanted)), abs=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_evicts_by_retention(family: str) -> None:
    """Fused projections, query norms, learned sinks, other layers beside: the tap finds its place."""
    model = tiny_model(family, dtype=torch.float64)
    gap = oracle_gap(
        model, POLICIES["dbtrimkv"], prompts=(34, 3), new=24, gates=random_gates(model), page_size=5
    )
    assert gap.largest < 1e-9
    assert gap.evictions > 1


@pytest.mark.parametrize("name", POLICIES)
def test_a_second_turn_on_an_evicted_cache(name: str) -> None:
    """Several tokens at once after evictions: they are gated, stored and ranked like all others."""
    model = tiny_model("llama", dtype=torch.float64)
    ids, mask = tokens(2, 70), torch.ones(2, 70, dtype=torch.int64)
    lengths = [28, *[1] * 12, 9, *[1] * 21]
    cache = WatchedCache(model, POLICIES[name], gates=random_gates(model), page_size=5)
    ours = feed(model, cache, ids, mask, lengths)
    cache.check_integrity()
    assert cache.trace.evictions > 2
    restore(model)
    theirs = replay(model, cache.seen, ids, mask, lengths)
    assert float((torch.cat(ours, 1) - torch.cat(theirs, 1)).abs().max()) < 1e-9


def test_heads_really_differ() -> None:
    """One budget for the model would be worth nothing if every head kept the same number."""
    model = tiny_model("llama")
    cache = kvkeep.RetentionCache(model, POLICIES["dbtrimkv"], gates=random_gates(model))
    feed(model, cache, tokens(1, 48), torch.ones(1, 48, dtype=torch.int64), [40, *[1] * 8])
    held = [len(head) for layer in range(2) for head in cache.kept_positions(layer)[0]]
    assert sum(held) < 4 * (24 + 8)
    assert len(set(held)) > 1
    assert cache.trace.mean_entries < 32


@pytest.mark.parametrize("name", ["trimkv", "dbtrimkv"])
def test_rows_may_be_reordered_and_repeated(name: str) -> None:
    """Beams: a row that becomes another takes its retentions along."""
    model = tiny_model("llama", dtype=torch.float64)
    gates, ids = random_gates(model), tokens(2, 60)
    ones = torch.ones_like(ids)
    cache = kvkeep.RetentionCache(model, POLICIES[name], gates=gates, page_size=5)
    feed(model, cache, ids, ones, [30, *[1] * 6])
    index = torch.tensor([1, 0, 1])
    cache.reorder_cache(index)
    after = feed(model, cache, ids[index], ones[index], [1] * 20)
    cache.check_integrity()
    for place, row in enumerate(index.tolist()):
        alone = kvkeep.RetentionCache(model, POLICIES[name], gates=gates, page_size=5)
        theirs = feed(model, alone, ids[row : row + 1], ones[:1], [30, *[1] * 26])
        assert float((after[-1][place] - theirs[-1][0]).abs().max()) < 1e-9
        for layer in range(2):
            mine, other = cache.kept_positions(layer)[place], alone.kept_positions(layer)[0]
            assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 3}])
def test_generate(options: dict[str, Any]) -> None:
    """As a user calls it: beams and several samples, padded prompts, chunked prefill."""
    model = tiny_model("llama")
    ids, mask = left_padded((40, 9))
    policy = kvkeep.DBTrimKV(budget=16, buffer=4, prefill="chunk")
    output, cache = kvkeep.generate(
        model,
        policy,
        {"input_ids": ids, "attention_mask": mask},
        max_new_tokens=24,
        gates=random_gates(model),
        prefill_chunk_size=8,
        **options,
    )
    assert output.shape[1] == 64
    assert cache.trace.evictions > 4
    assert cache.trace.mean_entries <= 20
    cache.check_integrity()


@pytest.mark.parametrize("name", ["trimkv", "dbtrimkv"])
def test_save_and_load(name: str, tmp_path: Path) -> None:
    """A conversation goes on as if nothing had happened; with other gates it must not."""
    model, ids = tiny_model("llama"), tokens(2, 60)
    ones, gates, path = torch.ones_like(ids), random_gates(model), tmp_path / "cache.safetensors"
    cache = kvkeep.RetentionCache(model, POLICIES[name], gates=gates)
    feed(model, cache, ids, ones, [30, *[1] * 6])
    cache.save(path)
    again = kvkeep.RetentionCache.load(path, model, POLICIES[name], gates=gates)
    for one, other in zip(
        feed(model, cache, ids, ones, [1] * 20), feed(model, again, ids, ones, [1] * 20), strict=True
    ):
        assert torch.equal(one, other)
    with pytest.raises(DataFileError, match="it has gates"):
        kvkeep.RetentionCache.load(path, model, POLICIES[name], gates=random_gates(model, seed=1))


def test_crop() -> None:
    """Tokens that are taken back take their retention with them; past an eviction nothing comes back."""
    model, ids = tiny_model("llama"), tokens(1, 60)
    ones, gates = torch.ones_like(ids), random_gates(model)
    cache = kvkeep.RetentionCache(model, POLICIES["dbtrimkv"], gates=gates)
    other = kvkeep.RetentionCache(model, POLICIES["dbtrimkv"], gates=gates)
    feed(model, cache, torch.cat([ids[:, :20], tokens(1, 4, seed=9)], 1), ones, [20, 1, 1, 1, 1])
    cache.crop(20)
    feed(model, other, ids, ones, [20])
    for each in (cache, other):
        feed(model, each, ids, ones, [1] * 20)
    assert cache.trace.evictions > 0
    for layer in range(2):
        assert stored_retention(cache, layer) == stored_retention(other, layer)
    with pytest.raises(CacheError):
        cache.crop(10)


class TestTheModelIsLeftAsItWas:
    """Law 8 and the sixth sentence: nothing patched, nothing that stays."""

    def test_hooks_go_with_the_last_cache(self) -> None:
        model, gates = tiny_model("llama"), random_gates(tiny_model("llama"))
        first = kvkeep.RetentionCache(model, POLICIES["trimkv"], gates=gates)
        second = kvkeep.RetentionCache(model, POLICIES["dbtrimkv"], gates=gates)
        assert pre_hooks(model) == 2  # one for each layer, however many caches
        del first
        gc.collect()
        assert pre_hooks(model) == 2
        feed(model, second, tokens(1, 9), torch.ones(1, 9, dtype=torch.int64), [8, 1])
        del second
        gc.collect()
        assert pre_hooks(model) == 0

    def test_a_policy_without_gates_taps_nothing(self) -> None:
        model = tiny_model("llama")
        cache = kvkeep.RetentionCache(model, kvkeep.SnapKV(budget=24, buffer=8), gates=random_gates(model))
        assert cache.gates is None
        assert pre_hooks(model) == 0

    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    def test_other_caches_run_beside_it(self, attention: str) -> None:
        """On kvkeep's attention and on the stock one, with the hook in place: not a bit differs."""
        model, ids = tiny_model("llama"), tokens(2, 20)
        model.set_attn_implementation(attention)
        expected = model(ids).logits
        cache = kvkeep.RetentionCache(model, POLICIES["trimkv"], gates=random_gates(model))
        argument = cache_argument(model)
        assert torch.equal(model(ids, **{argument: DynamicCache(config=model.config)}).logits, expected)
        plain = kvkeep.RetentionCache(model, kvkeep.SnapKV(budget=24, buffer=8))
        assert torch.equal(model(ids, **{argument: plain}).logits, expected)
        restore(model)
        assert torch.equal(model(ids).logits, expected)
        assert torch.equal(model(ids).logits, expected)
        del cache

    def test_a_copied_model_works_alone(self) -> None:
        """Copies carry the hook along; it must not need anything of the original."""
        model = tiny_model("llama")
        cache = kvkeep.RetentionCache(model, POLICIES["trimkv"], gates=random_gates(model))
        twin = copy.deepcopy(model)
        del cache, model
        gc.collect()
        other = kvkeep.RetentionCache(twin, POLICIES["trimkv"], gates=random_gates(twin))
        feed(twin, other, tokens(1, 40), torch.ones(1, 40, dtype=torch.int64), [36, *[1] * 4])
        assert other.trace.evictions > 0


class TestRefusals:
    """Each says what is missing and how to get it."""

    def test_no_gates(self) -> None:
        with pytest.raises(UnsupportedError, match=r"pass gates=kvkeep\.gates\.load\(path\)"):
            kvkeep.RetentionCache(tiny_model("llama"), POLICIES["trimkv"])

    def test_gates_of_another_model(self) -> None:
        with pytest.raises(UnsupportedError, match="made for model_type 'qwen3', the model has 'llama'"):
            kvkeep.RetentionCache(
                tiny_model("llama"), POLICIES["trimkv"], gates=random_gates(tiny_model("qwen3"))
            )

    def test_a_path(self) -> None:
        with pytest.raises(ConfigError, match=r"'g\.safetensors' is a path: pass gates=kvkeep\.gates\.load"):
            kvkeep.RetentionCache(tiny_model("llama"), POLICIES["trimkv"], gates="g.safetensors")

    def test_a_module_that_takes_no_more_arguments(self) -> None:
        class Closed(nn.Module):
            layer_idx, is_causal = 0, True

            def forward(self, hidden_states: Tensor) -> Tensor:
                return hidden_states

        model = tiny_model("llama")
        model.model.layers[0].self_attn = Closed()
        spec = model_spec(model.config)
        with pytest.raises(UnsupportedError, match="Closed takes no further arguments"):
            tap(model, spec, RetentionGates)
        del model.model.layers[0].self_attn
        with pytest.raises(UnsupportedError, match=r"no single attention module was found for layers \[0\]"):
            tap(model, spec, RetentionGates)

    def test_an_input_that_is_lost_on_the_way(self) -> None:
        """A compiled model may ignore a hook that came later: better an error than retentions of zero."""
        model = tiny_model("llama")
        cache = kvkeep.RetentionCache(model, POLICIES["trimkv"], gates=random_gates(model))
        for module in model.modules():
            module._forward_pre_hooks.clear()
        with pytest.raises(UnsupportedError, match="LlamaAttention did not pass its input on"):
            feed(model, cache, tokens(1, 4), torch.ones(1, 4, dtype=torch.int64), [4])
