"""The attention that h2o counts is the attention that the model paid: every query, every entry, once."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import GraniteConfig, GraniteForCausalLM, LlamaConfig, LlamaForCausalLM

import kvkeep
from kvkeep.core.view import LayerView
from kvkeep.engine.generation import cache_argument

pytestmark = pytest.mark.usefixtures("either_store")

ROWS, LAYERS, KV_HEADS, GROUP = 3, 2, 2, 3


@dataclass(frozen=True, kw_only=True)
class Spy(kvkeep.H2O):
    """H2O that notes what it is shown."""

    name: ClassVar[str] = "h2o-spy"

    seen: list[LayerView] = field(default_factory=list, compare=False)

    def score(self, view: LayerView) -> Tensor:
        """As H2O."""
        sums = view.attention_sum.clone()  # the store moves its entries when the decision is carried out
        self.seen.append(dataclasses.replace(view, recorded={"attention_sum": sums}))
        return super().score(view)


class Ledger:
    """Sums in float64, one probability at a time, from the model's own attention weights."""

    def __init__(self, model: Any, cache: kvkeep.RetentionCache, policy: Spy) -> None:
        self.model, self.cache, self.policy = model, cache, policy
        self.paid: dict[tuple[int, int, int, int], float] = defaultdict(float)
        self.compared = 0

    def forward(self, ids: Tensor, mask: Tensor) -> None:
        """One forward of the model; check every eviction that it caused."""
        self.policy.seen.clear()
        if ids.shape[1] == 1:
            self.cache.evictor.before_token(self.cache.managed_layers)  # prefill="after" evicts here
            self._compare()
        before = [self.cache.kept_positions(layer) for layer in range(LAYERS)]
        lens = list(self.cache.trace.tokens) or [0] * ROWS
        options = {cache_argument(self.model): self.cache}
        with torch.no_grad():
            out = self.model(ids, attention_mask=mask, output_attentions=True, **options)
        new = mask[:, -ids.shape[1] :].sum(-1).tolist()
        for layer, weights in enumerate(out.attentions):
            for row in range(ROWS):
                held = before[layer][row] if before[layer] else [torch.tensor([])] * KV_HEADS
                fresh = list(range(lens[row], lens[row] + new[row]))
                pad = ids.shape[1] - new[row]
                # The first forward attends to its own columns, padding included.
                first = [None] * pad if not before[layer] else []
                for head in range(KV_HEADS):
                    slots = first + held[head].tolist() + fresh
                    for query_head in range(head * GROUP, (head + 1) * GROUP):
                        for column in range(pad, ids.shape[1]):
                            self._count(layer, row, head, slots, weights[row, query_head, column])
        self._compare()

    def _count(self, layer: int, row: int, head: int, slots: list[Any], shares: Tensor) -> None:
        for position, share in zip(slots, shares.tolist(), strict=False):
            if position is not None:
                self.paid[layer, row, head, position] += share / GROUP

    def _compare(self) -> None:
        for view in self.policy.seen:
            # All rows evict at once, or their lengths tell them apart.
            rows = [self.cache.trace.tokens.index(length) for length in view.seq_lens.tolist()]
            rows = list(range(ROWS)) if len(rows) == ROWS else rows
            for place, row in enumerate(rows):
                for head in range(KV_HEADS):
                    valid = view.valid[place, head]
                    positions = view.positions[place, head][valid].tolist()
                    expected = [self.paid[view.layer, row, head, p] for p in positions]
                    mine = view.attention_sum[place, head][valid].double()
                    torch.testing.assert_close(mine, torch.tensor(expected).double(), atol=2e-6, rtol=2e-5)
                    self.compared += len(expected)
        self.policy.seen.clear()


@pytest.fixture(scope="module")
def model() -> Any:
    """A tiny random Llama with three query heads per KV head."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=48,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=KV_HEADS * GROUP,
        num_key_value_heads=KV_HEADS,
        head_dim=8,
        max_position_embeddings=256,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("padding", [(0, 3, 1), (0, 0, 0)], ids=["padded", "even"])
@pytest.mark.parametrize("prefill", ["defer", "after", "chunk"])
@pytest.mark.parametrize(
    "chunks", [(5,), (12,), (30,), (30, 7, 19)], ids=["short", "ring", "long", "several turns"]
)
def test_sums_are_exact(model: Any, prefill: Any, chunks: tuple[int, ...], padding: tuple[int, ...]) -> None:
    """A query counted twice, or lost when the ring turns over, would make wrong heavy hitters."""
    policy = Spy(budget=16, buffer=6, prefill=prefill)
    cache = kvkeep.RetentionCache(model, policy)
    ledger = Ledger(model, cache, policy)
    source = torch.Generator().manual_seed(1)
    mask = torch.ones(ROWS, 0, dtype=torch.long)
    for turn, chunk in enumerate(chunks):
        real = torch.ones(ROWS, chunk, dtype=torch.long)
        if turn == 0:
            real = (torch.arange(chunk) >= torch.tensor(padding)[:, None]).long()
        mask = torch.cat([mask, real], dim=1)
        ledger.forward(torch.randint(0, 50, (ROWS, chunk), generator=source), mask)
        for _ in range(9):
            mask = torch.cat([mask, torch.ones(ROWS, 1, dtype=torch.long)], dim=1)
            ledger.forward(torch.randint(0, 50, (ROWS, 1), generator=source), mask)
    for _ in range(20):
        mask = torch.cat([mask, torch.ones(ROWS, 1, dtype=torch.long)], dim=1)
        ledger.forward(torch.randint(0, 50, (ROWS, 1), generator=source), mask)
    assert cache.trace.evictions >= 2 * ROWS
    assert ledger.compared > 500


def test_sums_are_exact_where_the_model_scales_its_logits_otherwise() -> None:
    """Gemma and Granite do not divide by sqrt(head_dim): softer or sharper scores than the model's own."""
    torch.manual_seed(0)
    config = GraniteConfig(
        vocab_size=50,
        hidden_size=48,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=KV_HEADS * GROUP,
        num_key_value_heads=KV_HEADS,
        initializer_range=0.3,
        attention_multiplier=1.5,
        max_position_embeddings=256,
        attn_implementation="eager",
    )
    model = GraniteForCausalLM(config).eval()
    policy = Spy(budget=16, buffer=6)
    cache = kvkeep.RetentionCache(model, policy)
    ledger = Ledger(model, cache, policy)
    ids, ones = torch.randint(0, 50, (ROWS, 40)), torch.ones(ROWS, 40, dtype=torch.long)
    for start, end in [(0, 12), *((step, step + 1) for step in range(12, 40))]:
        ledger.forward(ids[:, start:end], ones[:, :end])
    assert cache.trace.evictions >= 3 * ROWS
    assert ledger.compared > 500


@pytest.mark.parametrize("removed", [1, 4])
def test_cropped_tokens_stop_counting(model: Any, removed: int) -> None:
    """Drafted tokens that are taken back must not go on voting, nor shift the votes of the others."""
    policy = Spy(budget=24, buffer=8)
    cache = kvkeep.RetentionCache(model, policy)
    ledger = Ledger(model, cache, policy)
    ids = torch.randint(0, 50, (ROWS, 60), generator=torch.Generator().manual_seed(2))
    ones = torch.ones(ROWS, 80, dtype=torch.long)
    ledger.forward(ids[:, :20], ones[:, :20])
    for step in range(20, 23):
        ledger.forward(ids[:, step : step + 1], ones[:, : step + 1])
    before = dict(ledger.paid)
    for step in range(23, 23 + removed):
        ledger.forward(ids[:, step : step + 1], ones[:, : step + 1])
    cache.crop(-removed)
    ledger.paid.clear()
    ledger.paid.update(before)
    for step in range(23, 60):
        ledger.forward(ids[:, step : step + 1], ones[:, : step + 1])
    assert cache.trace.evictions >= 3 * ROWS
    assert ledger.compared > 500
