"""The losses of training against their definition: one document at a time, entry by entry, in float64.

Nothing is shared with the code under test but the gates themselves: the stock eager attention gets the
fading as a mask of its own, the losses are loops.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvkeep.engine.spec import model_spec
from kvkeep.engine.tap import attention_modules
from kvkeep.gates import RetentionGates
from kvkeep.testing.models import FAMILIES, random_gates, tiny_model, tokens
from kvkeep.training import Document, Recipe, training
from kvkeep.training.documents import Documents, stack

ROW = 40
TEXT = tokens(200, seed=5).tolist()
#: Two rows: documents of one and two tokens, one that is only read, one with a learned end, padding.
ROWS = [
    [Document(TEXT[:20], 3), Document(TEXT[20:21]), Document(TEXT[21:30])],
    [Document(TEXT[40:45]), Document(TEXT[45:46]), Document(TEXT[46:60], 20), Document(TEXT[60:62])],
]


@contextmanager
def fading_by_mask(
    model: PreTrainedModel, gates: RetentionGates | None, said: dict[int, Tensor]
) -> Iterator[None]:
    """Hand each attention module a mask with the fading in it, and note what the gates say."""
    spec = model_spec(model.config)
    windows = {layer.index: layer.window for layer in spec.layers}

    def hook(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        hidden, layer = kwargs["hidden_states"], module.layer_idx
        count, window = hidden.shape[1], windows[layer]
        log_beta = torch.zeros(spec.kv_heads, count)
        if gates is not None and window is None:
            said[layer] = log_beta = gates(layer, hidden)[0]
        mask = torch.full((spec.heads, count, count), float("-inf"), dtype=torch.float64)
        for t in range(count):
            for j in range(0 if window is None else max(0, t - window + 1), t + 1):
                for head in range(spec.heads):
                    mask[head, t, j] = (t - j) * log_beta[head * spec.kv_heads // spec.heads, j].double()
        return args, kwargs | {"attention_mask": mask[None]}

    modules = [found[0] for found in attention_modules(model, tuple(windows)).values()]
    hooks = [module.register_forward_pre_hook(hook, with_kwargs=True) for module in modules]
    model.set_attn_implementation("eager")
    yield
    for each in hooks:
        each.remove()


def read(model: PreTrainedModel, document: Document, gates: RetentionGates | None, said: Any) -> Tensor:
    with fading_by_mask(model, gates, said):
        ids = torch.tensor([list(document.ids)])
        return model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)


def excesses(said: Sequence[Tensor], tokens: int, recipe: Recipe) -> list[Tensor]:
    """The capacity loss of one document, place by place."""
    memory = recipe.memory * ROW if recipe.memory < 1 else recipe.memory
    heads = [log_beta[head].double() for log_beta in said for head in range(len(log_beta))]
    found = []
    for t in range(tokens):
        alive = [torch.stack([(head[j] * (t - j)).exp() for j in range(t + 1)]).sum() for head in heads]
        if recipe.limit == "local":
            found += [(each - memory).clamp(min=0) / max(t - memory, 1) for each in alive]
        else:
            free, most = len(heads) * memory, len(heads) * t
            found.append((torch.stack(alive).sum() - free).clamp(min=0) / max(most - free, 1))
    return found


def by_definition(model: PreTrainedModel, gates: RetentionGates, recipe: Recipe) -> tuple[Tensor, ...]:
    """Total, KL, next-token and capacity loss of :data:`ROWS`."""
    kl, next_token, capacity = [], [], []
    for document in (each for row in ROWS for each in row):
        said: dict[int, Tensor] = {}
        with torch.no_grad():
            wanted = read(model, document, None, {})
        found = read(model, document, gates, said)
        for place in range(max(document.learned_from, 1), len(document.ids)):
            p, q = wanted[place - 1], found[place - 1]
            kl.append((p.exp() * (p - q)).sum())
            next_token.append(-q[document.ids[place]])
        capacity += excesses(list(said.values()), len(document.ids), recipe)
    above = torch.stack(capacity)
    terms = [
        torch.stack(kl).mean(),
        torch.stack(next_token).mean(),
        above.sum() / max(1, int((above > 0).sum())),
    ]
    return (terms[0] + terms[1]) / 2 + terms[2], *terms


CASES = [
    (family, *case) for family in FAMILIES if family != "gpt-oss" for case in (("rg", 0.1), ("rg10", 1.5))
]


@pytest.mark.parametrize(("family", "architecture", "memory"), [("llama", "rg", 1), *CASES])
def test_losses_and_gradients_are_the_definition(family: str, architecture: Any, memory: float) -> None:
    model = tiny_model(family, dtype=torch.float64)
    recipe = Recipe(memory=memory, architecture=architecture, row=ROW, rows=2, width=16, block=7)
    documents = Documents(lambda number: ROWS[0][0], ROW, 2, "x")
    with training(model, documents, recipe, "base") as trainer:
        gates = trainer.student.gates.double()
        gates.load_state_dict(random_gates(model, architecture).state_dict())
        terms = trainer.student(stack(ROWS, ROW))
        terms.total.backward()
        mine = {name: each.grad for name, each in gates.named_parameters()}
    gates.zero_grad()
    expected = by_definition(model, gates, recipe)
    expected[0].backward()
    assert bool(expected[3] > 0)  # else nothing is said about the capacity loss
    for here, there in zip((terms.total, terms.kl, terms.next_token, terms.capacity), expected, strict=True):
        torch.testing.assert_close(here.double(), there, rtol=0, atol=1e-5)
    for name, each in gates.named_parameters():
        scale = float(each.grad.abs().max())
        assert float((mine[name] - each.grad).abs().max()) < 1e-4 * scale, name
