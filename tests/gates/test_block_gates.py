"""Block gates: against plain loops, kept up in a cache, on disk, and refused where they do not fit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import kvkeep
import kvkeep.gates
import kvkeep.testing
from kvkeep.core.errors import ConfigError, DataFileError, UnsupportedError
from kvkeep.engine.rotary import rope_of
from kvkeep.engine.sparse_layer import SparseLayer
from kvkeep.engine.spec import model_spec
from kvkeep.gates import BlockGates, BlockShape
from kvkeep.gates.block_gates import pool_blocks
from kvkeep.kernels.rotation import rotate, unrotate
from kvkeep.testing.models import left_padded, random_block_gates, random_gates, tiny_model, tokens
from kvkeep.testing.oracle import oracle_gap
from kvkeep.testing.watching import WatchedCache, feed
from tests.reference import seer

BLOCK = 4
SEER = kvkeep.SeerAttention(token_budget=12, block=BLOCK)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """With q and k norms, in float64."""
    return tiny_model("qwen3", dtype=torch.float64)


def lively(model: PreTrainedModel, **options: Any) -> BlockGates:
    """Gates whose norms are not all ones."""
    gates = random_block_gates(model, block=BLOCK, **options)
    for name, weight in gates.named_parameters():
        if "norm" in name:
            weight += 0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    return gates


@pytest.mark.parametrize("check", kvkeep.testing.checks(), ids=str)
def test_conformance(check: kvkeep.testing.Check) -> None:
    """The public suite, most of a sequence unread."""
    check(SEER)


@pytest.mark.parametrize("family", ["llama", "llama-yarn", "qwen3", "phi3"])
@pytest.mark.parametrize("threshold", [None, 0.2])
def test_oracle(family: str, threshold: float | None) -> None:
    """Logits equal those of a full cache in which what was not read is masked; also with ragged choices."""
    model = tiny_model(family, dtype=torch.float64)
    policy = kvkeep.SeerAttention(token_budget=12, block=BLOCK, threshold=threshold)
    gap = oracle_gap(model, policy, prompts=(40, 2, 13), new=40, chunk=9, gates=lively(model))
    assert gap.largest < 1e-9


def test_rotation_is_undone() -> None:
    """And nothing else."""
    model = tiny_model("qwen3", dtype=torch.float64)
    rope = rope_of(model, model_spec(model.config))
    vectors, positions = torch.randn(2, 3, 5, 16, dtype=torch.float64), torch.arange(10).view(2, 5)
    torch.testing.assert_close(unrotate(rotate(vectors, positions, rope), positions, rope), vectors)


def test_what_the_cache_shows_is_what_the_reference_says(model: PreTrainedModel) -> None:
    """Un-rotating, pooling, projecting, norming and turning again, block by block as tokens arrive."""
    gates = lively(model)
    ids, mask = left_padded((23, 6))
    ids, mask = torch.cat([ids, tokens(2, 12, seed=1)], 1), torch.cat([mask, mask.new_ones(2, 12)], 1)
    shown: list[tuple[int, Any]] = []

    class Telling(kvkeep.SeerAttention):
        def choose(self, view: Any) -> Any:
            shown.append((view.layer, view))
            return super().choose(view)

    cache = WatchedCache(model, Telling(token_budget=8, block=BLOCK), gates=gates)
    feed(model, cache, ids, mask, [23] + [1] * 12)
    rope, spec = rope_of(model, cache.spec), cache.spec
    angles = rope.inv_freq.double().tolist()
    for layer, view in shown[-2:]:
        store = cache.layers[layer].store
        gate: Any = gates.layers[str(layer)]
        for row, length in enumerate(view.lens.tolist()):
            positions = torch.arange(length)[None]
            keys = unrotate(store.keys[row : row + 1, :, :length], positions, rope)[0].tolist()
            query = view.queries[row : row + 1, :, None]
            queries = unrotate(query, torch.tensor([[length - 1]]), rope)[0, :, 0].tolist()
            group = spec.heads // spec.kv_heads
            for head in range(spec.kv_heads):
                for place in range(length // BLOCK):
                    expected = seer.logit(
                        queries[head * group : (head + 1) * group],
                        length - 1,
                        keys[head][place * BLOCK : (place + 1) * BLOCK],
                        place * BLOCK,
                        gate.query[head].tolist(),
                        gate.key[head].tolist(),
                        (gate.query_norm.tolist(), gate.key_norm.tolist()),
                        angles,
                    )
                    assert float(view.gate_logits[row, head, place]) == pytest.approx(expected, abs=2e-5)


def test_rows_taken_back_and_chosen(model: PreTrainedModel) -> None:
    """A crop and a choice of rows in mid-sequence read what a straight run reads."""
    gates, (ids, mask) = lively(model), left_padded((23, 6))
    ids, mask = torch.cat([ids, tokens(2, 14, seed=1)], 1), torch.cat([mask, mask.new_ones(2, 14)], 1)
    straight = kvkeep.RetentionCache(model, SEER, gates=gates)
    expected = feed(model, straight, ids, mask, [23] + [1] * 13)[-1]
    other = torch.cat([ids[:, :30], tokens(2, 7, seed=8)], 1)
    detour = kvkeep.RetentionCache(model, SEER, gates=gates)
    feed(model, detour, other, mask, [23] + [1] * 14)
    detour.crop(-7)
    detour.reorder_cache(torch.tensor([1, 0]))
    found = feed(model, detour, ids[[1, 0]], mask[[1, 0]], [1] * 6)[-1]
    torch.testing.assert_close(found, expected[[1, 0]])


def test_a_threshold_reads_what_has_its_share(model: PreTrainedModel) -> None:
    """Exactly those blocks, and the first and the newest."""
    gates = lively(model)
    noted: list[Any] = []

    class Telling(kvkeep.SeerAttention):
        def choose(self, view: Any) -> Any:
            decision = super().choose(view)
            noted.append((view, decision))
            return decision

    policy = Telling(block=BLOCK, threshold=0.15)
    feed(
        model,
        kvkeep.RetentionCache(model, policy, gates=gates),
        tokens(1, 40),
        torch.ones(1, 40),
        [22, *[1] * 18],
    )
    sizes = set()
    for view, decision in noted:
        full = int(view.lens[0]) // BLOCK
        newest = (int(view.lens[0]) - 1) // BLOCK
        for head in range(view.kv_heads):
            logits = view.gate_logits[0, head, :full].double().tolist()
            total = sum(math.exp(each) for each in logits)
            chosen = {j for j, each in enumerate(logits) if math.exp(each) / total >= 0.15} | {0, newest}
            assert decision.blocks[0, head, : int(decision.lengths[0, head])].tolist() == sorted(chosen)
            sizes.add(len(chosen))
    assert len(sizes) > 1


def test_pooling_ends_with_what_is_there() -> None:
    """The last block of a training document may be short."""
    keys = torch.randn(1, 2, 10, 3, dtype=torch.float64)
    pooled = pool_blocks(keys, BLOCK)
    assert pooled.shape == (1, 2, 3, 9)
    for head in range(2):
        for place in range(3):
            expected = seer.pooled(keys[0, head, place * 4 : place * 4 + 4].tolist())
            assert pooled[0, head, place].tolist() == pytest.approx(expected)


def test_on_disk_and_back(model: PreTrainedModel, tmp_path: Path) -> None:
    """As they were; `kvkeep.gates.load` knows both kinds, and damage is told."""
    gates = lively(model)
    path = tmp_path / "gates.safetensors"
    kvkeep.gates.save_blocks(gates, path, base_sha256="0" * 64)
    back = kvkeep.gates.load(path, model_spec(model.config))
    assert isinstance(back, BlockGates)
    assert back.shape == gates.shape
    assert back.base == "0" * 64
    with pytest.raises(DataFileError, match="trained beside a model whose weights"):
        kvkeep.gates.load(path, base_sha256="1" * 64)
    with pytest.raises(DataFileError, match="does not fit this 'llama' model"):
        kvkeep.gates.load(path, model_spec(tiny_model("llama").config))
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(DataFileError):
        kvkeep.gates.load(path)


@pytest.mark.parametrize(
    ("policy", "kind", "message"),
    [
        (SEER, None, "needs block gates that were trained for this model"),
        (SEER, "retention", "needs block gates, and these are retention gates"),
        (kvkeep.SeerAttention(block=8, token_budget=16), "blocks", "trained for blocks of 4 entries"),
        (kvkeep.TrimKV(budget=64), "blocks", "needs retention gates, and these are block gates"),
    ],
)
def test_gates_that_do_not_fit(model: PreTrainedModel, policy: Any, kind: str | None, message: str) -> None:
    """Before a token is read."""
    made = {"retention": random_gates, "blocks": lambda one: random_block_gates(one, block=BLOCK)}
    gates = None if kind is None else made[kind](model)
    with pytest.raises(UnsupportedError, match=message):
        kvkeep.RetentionCache(model, policy, gates=gates)


def test_wrong_numbers() -> None:
    """Shares and sizes."""
    for threshold in (0.0, 1.5):
        with pytest.raises(ConfigError, match="outside"):
            kvkeep.SeerAttention(threshold=threshold)
    with pytest.raises(ConfigError, match="block gates of width 0"):
        BlockShape(width=0, model_type="llama", heads=4, kv_heads=2, head_dim=8, layers=(0,))


def test_dense_layers_keep_no_index(model: PreTrainedModel) -> None:
    """What is never chosen from needs nothing kept."""
    policy = kvkeep.SeerAttention(token_budget=8, block=BLOCK, dense_layers=1)
    cache = kvkeep.RetentionCache(model, policy, gates=lively(model))
    feed(model, cache, tokens(1, 40), torch.ones(1, 40), [39, 1])
    first, second = (layer for layer in cache.managed_layers if isinstance(layer, SparseLayer))
    assert first.index_nbytes == 0 < second.index_nbytes
    assert cache.trace.mean_read == (40 + 8) / 2
