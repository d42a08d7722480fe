"""What every engine's generator does alike: prompts to tokens, tokens to text, and the facts of a header."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvkeep.core.policy import Policy
from kvkeep.core.precision import Precision
from kvkeep.evaluation.identity import plain
from kvkeep.evaluation.prompts import PromptTemplate
from kvkeep.evaluation.sampling import Sampling


def encode(text: str, template: PromptTemplate, tokenizer: Any) -> list[int]:
    """Tokens of a text; a chat template writes the special tokens itself."""
    return list(tokenizer(text, add_special_tokens=not template.chat)["input_ids"])


def as_text(tokens: Sequence[int], tokenizer: Any) -> str:
    """The text of an answer, special tokens left out."""
    # Cleaning up would drop the space before a question mark, a word in some vocabularies.
    return str(tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def header_facts(
    *,
    name: str,
    weights_sha256: str,
    policy: Policy,
    template: PromptTemplate,
    tokenizer: Any,
    sampling: Sampling,
    calibration_sha256: str | None,
    gates_sha256: str | None,
    precision: Precision | None = None,
    extra: Mapping[str, Any],
) -> dict[str, Any]:
    """What a generator says in the header of its runs (see :class:`~kvkeep.evaluation.records.RunHeader`).

    Parameters
    ----------
    name, weights_sha256
        Of the model.
    calibration_sha256, gates_sha256
        Of files that the policy may read; left out of the header if it reads none.
    precision
        Of the stored entries.
    extra
        What only this engine has to say.
    """
    amount, traits = policy.amount, policy.traits
    return {
        "policy": policy.name,
        "policy_options": plain(policy.options()),
        "budget": {"entries": amount.entries, "prompt": amount.prompt} if policy.bounded else {},
        "model": name,
        "model_sha256": weights_sha256,
        "prompt_sha256": template.fingerprint(tokenizer),
        "sampling": sampling.as_dict(),
        "calibration_sha256": calibration_sha256 if traits.calibration else None,
        "gates_sha256": gates_sha256 if traits.gated else None,
        "precision": None if precision is None else precision.as_dict(),
        "extra": {
            "prompt": template.name,
            "draws_differ_by": "policy" if sampling.greedy else "sampling",
            **extra,
        },
    }
