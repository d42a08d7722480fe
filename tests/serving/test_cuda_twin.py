"""The back end for CUDA on a CPU: vLLM's FlashAttention classes with their two kernels replaced by twins.

What the GPU itself does is left out: kernels, streams, graphs. All else is vLLM's and ours: the attention
layer, its spec, the builder, the metadata, the layout of the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from kvkeep.testing.views import kept, make_counts, make_view
from tests.serving.flash_layers import BLOCKS, BUDGET, BUFFER, DIM, SLOTS, Engine, make_engine, twins

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm has an environment for it")
pytestmark = pytest.mark.filterwarnings("default")  # vLLM's own are not ours to mend

POLICIES = ("streaming-llm", "key-norm", "snapkv", "vase-dkv")
PROMPTS = (7, 95, 52, 1, 130)
#: Tokens that each request reads in each step: chunks, single tokens beside them, one that waits or joins.
STEPS = [
    [7, 30, 20, 1, 0],
    [1, 65, 31, 1, 70],
    [1, 0, 1, 40, 60],
    *([1, 1, 1, 1, 1] for _ in range(20)),
    [1, 3, 0, 17, 1],
]


@dataclass
class Request:
    """A request as lists: what it read, and what each KV head of a layer still holds.

    Parameters
    ----------
    prompt
        Tokens of the prompt.
    blocks
        That it owns.
    """

    prompt: int
    blocks: list[int]
    tokens: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)  # queries, keys, values
    held: list[list[int]] = field(default_factory=list)
    evictions: int = 0

    def attend(self, token: tuple[Tensor, Tensor, Tensor], policy: Any, limit: int) -> Tensor:
        """Evict if it is time, store one token, and attend: ``[heads, dim]``."""
        query, key, _ = token
        self.held = self.held or [[] for _ in key]
        if len(self.held[0]) == limit + policy.buffer:
            self._evict(policy, limit)
        self.tokens.append(token)
        for head in self.held:
            head.append(len(self.tokens) - 1)
        group, results = len(query) // len(key), []
        for head, vector in enumerate(query):
            mine = self.held[head // group]
            keys, values = (
                torch.stack([self.tokens[at][part][head // group] for at in mine]) for part in (1, 2)
            )
            logits = keys.float() @ vector.float() * DIM**-0.5
            results.append(logits.softmax(0) @ values.float())
        return torch.stack(results)

    def _evict(self, policy: Any, limit: int) -> None:
        every, positions = torch.arange(len(self.held))[:, None], torch.tensor(self.held)
        queries, keys, values = (torch.stack([token[part] for token in self.tokens], 1) for part in range(3))
        seen, recorded = len(self.tokens), {}
        if window := policy.traits.queries:
            recorded["queries"] = queries[None, :, -window:]
            recorded["query_positions"] = torch.arange(seen - window, seen)[None]
        view = make_view(
            policy,
            keys=keys[every, positions][None],
            values=values[every, positions][None],
            positions=positions[None],
            seq_lens=[seen],
            prompt_lens=[limit - BUDGET],
            layer=1,
            sequence_ids=[0],
            evictions=[self.evictions],
            **recorded,
        )
        decision = policy.decide([view], [make_counts(view, limit)])[0]
        self.held = [[old[at] for at in new] for old, new in zip(self.held, kept(decision)[0], strict=True)]
        self.evictions += 1


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU here."""
    twins(monkeypatch)


def common_metadata(starts: list[int], counts: list[int], table: Tensor) -> Any:
    """A step as the runner describes it.

    Where entries have been evicted, lengths on the device and vLLM's own slots are rubbish: nobody may wait
    for the one or use the other. Where none have, the step is vLLM's, and they are right.
    """
    from vllm.v1.attention.backend import CommonAttentionMetadata

    bounds = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    lens = torch.tensor([start + count for start, count in zip(starts, counts, strict=True)]).int()
    slots = [
        int(row[position // SLOTS]) * SLOTS + position % SLOTS
        for row, start, count in zip(table, starts, counts, strict=True)
        for position in range(start, start + count)
    ]
    rubbish = int(lens.max()) > BUDGET + BUFFER
    return CommonAttentionMetadata(
        query_start_loc=torch.full_like(bounds, -7) if rubbish else bounds,
        query_start_loc_cpu=bounds,
        seq_lens=torch.full_like(lens, -7) if rubbish else lens,
        seq_lens_cpu_upper_bound=lens,
        num_reqs=len(counts),
        num_actual_tokens=int(bounds[-1]),
        max_query_len=max(counts),
        max_seq_len=int(lens.max()),
        block_table_tensor=table,
        slot_mapping=torch.full((len(slots),), -7) if rubbish else torch.tensor(slots),
    )


def run(engine: Engine, requests: list[Request], table: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Read everything; yields the outputs of each step and what they ought to be."""
    policy, impl = engine.full.impl._deployment.policy, engine.full.impl
    heads, kv_heads, dtype = impl.num_heads, impl.num_kv_heads, engine.cache.dtype
    noise = torch.Generator().manual_seed(5)
    for counts in STEPS:
        starts = [len(request.tokens) for request in requests]
        common = common_metadata(starts, counts, table)
        total = common.num_actual_tokens
        padded = total + 3  # graphs pad the tokens around attention
        query, key, value = (
            2 * torch.randn(padded, count, DIM, generator=noise).to(dtype)
            for count in (heads, kv_heads, kv_heads)
        )
        metadata = engine.builder.build(0, common)
        output = torch.full_like(query, 9.0)
        before = engine.cache.clone()
        impl.do_kv_cache_update(engine.full, key, value, engine.cache, common.slot_mapping)
        assert torch.equal(engine.cache, before)  # vLLM's own slots are logical
        impl.forward(engine.full, query, key, value, engine.cache, metadata, output)
        assert bool((output[total:] == 9).all())
        wanted, token = [], 0
        for request, count in zip(requests, counts, strict=True):
            limit = engine.spec.schedule.kept(request.prompt)
            for _ in range(count):
                wanted.append(request.attend((query[token], key[token], value[token]), policy, limit))
                token += 1
        yield output[:total].float(), torch.stack(wanted)


def make_requests(engine: Engine, prompts: tuple[int, ...], rest: int = 0) -> tuple[list[Request], Tensor]:
    """Requests with the blocks of their schedule, and their table; ``rest`` stands behind what they own."""
    shuffled = (torch.randperm(BLOCKS - 1, generator=torch.Generator().manual_seed(2)) + 1).tolist()
    requests = []
    for prompt in prompts:
        count = engine.spec.schedule.blocks(prompt)
        requests.append(Request(prompt, shuffled[:count]))
        del shuffled[:count]
    width = max(len(request.blocks) for request in requests) + 20
    table = [request.blocks + [rest] * (width - len(request.blocks)) for request in requests]
    return requests, torch.tensor(table, dtype=torch.int32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("policy", POLICIES)
def test_flash_attention_over_a_bounded_cache(policy: str, dtype: str) -> None:
    """On a GPU, users would be answered from other entries than the policy kept."""
    engine = make_engine(policy, dtype)
    # Model runner V2 leaves the blocks of former requests behind those of a row.
    requests, table = make_requests(engine, PROMPTS, rest=BLOCKS - 1)
    for output, wanted in run(engine, requests, table):
        torch.testing.assert_close(output, wanted, **TOLERANCE[dtype])
    assert [request.evictions for request in requests] == [0, 6, 2, 3, 9]
    if policy != "streaming-llm":
        assert all(request.held[0] != request.held[1] for request in requests if request.evictions)


@pytest.mark.parametrize("policy", ["snapkv", "vase-dkv"])
def test_a_kept_prompt_is_known_by_its_blocks(policy: str) -> None:
    """Model runner V1 leaves zeros behind a row, which say how long its prompt is."""
    engine = make_engine(policy, "float32", prompt="kept")
    requests, table = make_requests(engine, prompts=(3, 20, 17, 1, 30))
    for output, wanted in run(engine, requests, table):
        torch.testing.assert_close(output, wanted, **TOLERANCE["float32"])
    assert [request.evictions for request in requests] == [0, 3, 0, 1, 6]


#: Stored numbers have 8 bits in bfloat16, and so has the output.
TOLERANCE = {"float32": {"rtol": 2e-5, "atol": 2e-5}, "bfloat16": {"rtol": 1e-2, "atol": 2e-2}}
