"""Under `generate`: batches, beams, several samples, streamers, sampling; every family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

import kvkeep
from kvkeep.core.policy import Policy
from kvkeep.engine.generation import cache_argument
from kvkeep.testing.models import FAMILIES, left_padded, tiny_model, tokens
from kvkeep.testing.oracle import oracle_gap

pytestmark = pytest.mark.usefixtures("either_store")

POLICIES: dict[str, Policy] = {
    "vase-attnv": kvkeep.VaSEAttnV(budget=24, buffer=8),
    "vase-dkv": kvkeep.VaSEDKV(budget=24, buffer=8),
}
PROMPTS = (5, 34, 1, 17, 26)
CASES = [*((family, "vase-attnv") for family in FAMILIES), ("llama", "vase-dkv"), ("gemma3", "vase-dkv")]


def write(
    model: PreTrainedModel,
    policy: Policy,
    ids: Tensor,
    mask: Tensor,
    names: list[int] | None = None,
    new: int = 40,
    **options: Any,
) -> tuple[Tensor, kvkeep.RetentionCache]:
    """Generated ids without the prompt, and the cache."""
    cache = kvkeep.RetentionCache(model, policy, sequence_ids=names)
    settings = {"max_new_tokens": new, "do_sample": False} | options
    output = model.generate(ids, attention_mask=mask, **settings, **{cache_argument(model): cache})
    cache.check_integrity()
    return output[:, ids.shape[1] :], cache


@pytest.mark.parametrize(("family", "name"), CASES)
def test_a_padded_batch_equals_its_prompts_alone(family: str, name: str) -> None:
    """A user's answer would depend on who else was served in the same batch."""
    model, policy = tiny_model(family, dtype=torch.float64), POLICIES[name]
    ids, mask = left_padded(PROMPTS)
    together, cache = write(model, policy, ids, mask, names=[3, 1, 4, 0, 5], new=32)
    for row, (length, identity) in enumerate(zip(PROMPTS, [3, 1, 4, 0, 5], strict=True)):
        alone, single = write(
            model, policy, ids[row : row + 1, -length:], mask[row : row + 1, -length:], [identity], 32
        )
        assert torch.equal(alone[0], together[row])
        for layer in cache.spec.managed:
            pairs = zip(single.kept_positions(layer)[0], cache.kept_positions(layer)[row], strict=True)
            assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
        assert single.trace.evictions >= 1


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 3}])
def test_a_full_kvkeep_cache_writes_what_the_stock_cache_writes(family: str, options: dict[str, Any]) -> None:
    """Beams and samples move rows about; with nothing evicted the text is known."""
    model = tiny_model(family, dtype=torch.float64)
    ids, mask = left_padded((4, 18))
    torch.manual_seed(3)
    ours, _ = write(model, kvkeep.Full(), ids, mask, new=16, **options)
    kvkeep.restore(model)
    torch.manual_seed(3)
    stock = DynamicCache(config=model.config.get_text_config(decoder=True))
    settings = {"max_new_tokens": 16, "do_sample": False} | options | {cache_argument(model): stock}
    theirs = model.generate(ids, attention_mask=mask, **settings)
    assert torch.equal(ours, theirs[:, 18:])


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_beams_keep_inside_the_budget(policy: Policy) -> None:
    """Beams copy rows: their lengths, positions and random streams must come along."""
    model = tiny_model(dtype=torch.float64)
    ids, mask = left_padded((4, 30))
    first, cache = write(model, policy, ids, mask, num_beams=3, num_return_sequences=2)
    again, _ = write(model, policy, ids, mask, num_beams=3, num_return_sequences=2)
    assert first.shape == (4, 40)
    assert torch.equal(first, again)
    assert cache.trace.tokens == (4 + 39,) * 3 + (30 + 39,) * 3
    assert cache.trace.evictions >= 6
    for layer in cache.managed_layers:
        assert ((layer.stored.held >= 24) & (layer.stored.held < 24 + 8)).all()


def test_several_samples_of_one_prompt_are_independent_sequences() -> None:
    """Samples of the same prompt must not share random numbers, or they thin out alike."""
    model = tiny_model(dtype=torch.float64)
    ids, mask = tokens(1, 30), torch.ones(1, 30, dtype=torch.int64)
    torch.manual_seed(0)
    samples, cache = write(model, POLICIES["vase-dkv"], ids, mask, do_sample=True, num_return_sequences=3)
    torch.manual_seed(0)
    rows, _ = write(model, POLICIES["vase-dkv"], ids.repeat(3, 1), mask.repeat(3, 1), do_sample=True)
    assert torch.equal(samples, rows)
    assert cache.rows.sequence_ids == [0, 1, 2]
    _, cache = write(model, POLICIES["vase-dkv"], ids.repeat(2, 1), mask.repeat(2, 1))
    kept = cache.kept_positions(0)
    assert not torch.equal(kept[0][0], kept[1][0])


def test_a_seed_repeats_a_run_and_another_seed_does_not() -> None:
    """Two runs of an experiment under one seed are one run."""
    model = tiny_model()
    inputs = {"input_ids": tokens(1, 30)}

    def kept(seed: int) -> list[int]:
        _, cache = kvkeep.generate(model, POLICIES["vase-dkv"], inputs, max_new_tokens=20, seed=seed)
        return cache.kept_positions(1)[0][1].tolist()

    assert kept(1) == kept(1)
    assert kept(1) != kept(2)


def test_a_streamer_sees_every_token_as_it_is_written() -> None:
    """The demo streams its answer."""

    class Collect(BaseStreamer):
        def __init__(self) -> None:
            self.pieces: list[Tensor] = []
            self.ended = False

        def put(self, value: Tensor) -> None:
            self.pieces.append(value.reshape(-1))

        def end(self) -> None:
            self.ended = True

    streamer = Collect()
    model = tiny_model()
    ids, mask = tokens(1, 30), torch.ones(1, 30, dtype=torch.int64)
    output, _ = write(model, POLICIES["vase-attnv"], ids, mask, streamer=streamer)
    assert streamer.ended
    assert torch.equal(torch.cat(streamer.pieces), torch.cat([ids[0], output[0]]))


def test_sequences_may_end_at_different_times() -> None:
    """A row that has ended is fed padding until the others end; theirs must not change."""
    model = tiny_model(dtype=torch.float64)
    ids, mask = left_padded((9, 30))
    free, _ = write(model, POLICIES["vase-attnv"], ids, mask)
    end = int(free[0, 3])
    ended, _ = write(model, POLICIES["vase-attnv"], ids, mask, eos_token_id=end)
    length = (free[1] == end).nonzero()[0, 0] + 1 if (free[1] == end).any() else 40
    assert torch.equal(ended[1, :length], free[1, :length])
    assert (ended[0, 4:] == 0).all()


@pytest.mark.parametrize(
    ("dtype", "gap"), [(torch.float32, 1e-4), (torch.bfloat16, 0.4), (torch.float16, 0.05)], ids=str
)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_every_type_on_every_back_end(family: str, attention: str, dtype: torch.dtype, gap: float) -> None:
    """Masks, scores and storage follow the model's type: float32's lowest number is no float16."""
    model = tiny_model(family, dtype=dtype, attention=attention)
    for policy in POLICIES.values():
        found = oracle_gap(model, policy, prompts=(5, 30), new=30)
        assert found.largest < gap
        assert found.evictions >= 3
    output, cache = write(model, POLICIES["vase-attnv"], *left_padded((5, 30)))
    assert output.shape == (2, 40)
    assert cache.managed_layers[0].stored.memory.keys.dtype == dtype
