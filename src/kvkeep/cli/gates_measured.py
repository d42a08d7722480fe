"""What trained gates hold when entries are really evicted, for the card of a training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvkeep.gates import RetentionGates
    from kvkeep.training import Documents

_TEXTS = 4
_LOOKED_AT = 16
_ROUNDS = 4  # evictions in the time in which the memory would fill anew


def windows(held_out: Documents) -> Tensor:
    """The longest few of the first held-out documents, cut to the length of the shortest of them.

    Returns
    -------
    Tensor
        int64 ``[texts, tokens]``.
    """
    drawn = (tuple(held_out.source(number).ids[: held_out.row]) for number in range(_LOOKED_AT))
    longest = sorted(dict.fromkeys(drawn), key=lambda ids: -len(ids))[:_TEXTS]
    return torch.tensor([ids[: len(longest[-1])] for ids in longest])


def evicting(
    model: PreTrainedModel, policy: str, gates: RetentionGates, held_out: Documents, memory: float
) -> dict[str, Any] | None:
    """Likelihood of held-out texts with a budget of the memory trained for, beside the full cache.

    Parameters
    ----------
    policy
        Name of the policy that the gates are for.
    memory
        Entries per KV head; below 1 a share of the texts' length.

    Returns
    -------
    dict or None
        Nats per token and measured mean cache of both, over all tokens, prompts included; ``None`` if the
        texts are so short that nothing is evicted.
    """
    from kvkeep.evaluation.likelihood import read_windows
    from kvkeep.evaluation.likelihood_summary import summarise
    from kvkeep.policies.compose import policy as make_policy

    texts = windows(held_out)
    count, length = texts.shape
    budget = max(1, int(memory * length if memory < 1 else memory))
    chunk = max(1, budget // _ROUNDS)
    if budget + chunk >= length:
        return None
    evicts = make_policy(policy, budget=budget, buffer=chunk, prefill="chunk")
    keeps = make_policy("full", prefill="chunk")
    gates.eval()
    found = {
        name: summarise(read_windows(model, each, texts, chunk=chunk, gates=gates))
        for name, each in (("evicting", evicts), ("full", keeps))
    }
    return {
        "texts": count,
        "tokens": length,
        "budget": budget,
        "buffer": chunk,
        **{
            name: {"nats": round(one.all_tokens.nats, 6), "mean_cache": round(one.mean_cache, 2)}
            for name, one in found.items()
        },
    }
