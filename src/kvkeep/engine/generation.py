"""Generate text under a policy: `model.generate` with the cache built and passed for you."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers import GenerationMixin, LogitsProcessorList, PreTrainedModel

from kvkeep.core.errors import ConfigError
from kvkeep.core.policy import Policy
from kvkeep.core.precision import Precision
from kvkeep.engine.arguments import require_model
from kvkeep.engine.fitting import StoreKind
from kvkeep.engine.repetition import Repetition, RepetitionWarper
from kvkeep.engine.retention_cache import RetentionCache
from kvkeep.engine.spec import model_spec
from kvkeep.engine.surprise import EntropyNote

_NEW, _OLD = "cache", "past_key_values"


def cache_argument(model: Any = None) -> str:
    """The keyword under which ``generate`` and ``forward`` take a cache.

    transformers 5.24 renamed ``past_key_values`` to ``cache`` and warns about the old name; earlier
    releases know only the old one. The installed signatures decide, not a version number.

    Parameters
    ----------
    model
        A model of transformers; without one the answer is that of ``GenerationMixin``.

    Examples
    --------
    >>> cache_argument() in ("cache", "past_key_values")
    True
    """
    for function in (getattr(model, "forward", None), GenerationMixin.prepare_inputs_for_generation):
        parameters = inspect.signature(function).parameters if function is not None else {}
        for name in (_NEW, _OLD):
            if name in parameters:
                return name
    return _OLD


def generate(
    model: PreTrainedModel,
    policy: Policy,
    inputs: Mapping[str, Tensor],
    *,
    max_new_tokens: int,
    seed: int = 0,
    sequence_ids: Sequence[int] | None = None,
    calibration: Any = None,
    gates: Any = None,
    store: StoreKind = "auto",
    repetition: Repetition | None = None,
    bits: int | None = None,
    protect: str = "range",
    precision: Precision | None = None,
    **options: Any,
) -> tuple[Tensor, RetentionCache]:
    """Run ``model.generate`` on a fresh cache, with ratios and sizes resolved for this very call.

    Parameters
    ----------
    model
        A causal language model of transformers.
    policy
        What to keep.
    inputs
        What the tokenizer returned: ``input_ids`` ``[batch, tokens]``, and ``attention_mask`` where
        rows are padded (on the left).
    max_new_tokens
        Most tokens to write per sequence. A budget given as a ratio refers to prompt and new tokens.
    seed, sequence_ids, calibration, gates, store, bits, protect, precision
        As in :class:`~kvkeep.RetentionCache`.
    repetition
        Raise the temperature of texts that repeat themselves; needs ``do_sample=True``.
    options
        Handed on to ``model.generate`` (sampling, beams, streamer, ``prefill_chunk_size`` …).

    Returns
    -------
    tuple
        Token ids ``[batch, prompt + new]`` (or what ``return_dict_in_generate`` asks for), and the
        cache, whose ``trace`` holds what was measured.

    Raises
    ------
    ConfigError
        If a prompt is empty or longer than the model's positions.
    UnsupportedError, BudgetError
        As in :class:`~kvkeep.RetentionCache`.
    """
    require_model(model)
    rows, columns = inputs["input_ids"].shape
    mask = inputs.get("attention_mask")
    lengths = [columns] * rows if mask is None else [int(count) for count in mask.sum(-1).tolist()]
    check_prompt_lengths(lengths, model_spec(model.config).max_positions)
    if options.get("prefill_chunk_size") is not None:
        options["prefill_chunk_size"] = chunk_without_rest(columns, options["prefill_chunk_size"])
    processors = list(options.pop("logits_processor", None) or [])
    if repetition is not None:
        usual = float(options.get("temperature") or 1.0) if options.get("do_sample") else 0.0
        processors.append(RepetitionWarper(repetition, usual, columns))
    copies = max(options.get("num_beams") or 1, options.get("num_return_sequences") or 1)
    cache = RetentionCache(
        model,
        policy,
        seed=seed,
        sequence_ids=sequence_ids,
        calibration=calibration,
        gates=gates,
        context=max(lengths) + max_new_tokens,
        rows=rows * copies,
        store=store,
        bits=bits,
        protect=protect,
        precision=precision,
    )
    if cache.wants_entropy:
        processors.insert(0, EntropyNote(cache))
    if processors:
        options["logits_processor"] = LogitsProcessorList(processors)
    output = model.generate(
        **inputs, max_new_tokens=max_new_tokens, **{cache_argument(model): cache}, **options
    )
    return output, cache


def chunk_without_rest(columns: int, chunk: int) -> int:
    """The smallest chunk of at least ``chunk`` tokens that leaves no single token at the end of a prompt.

    A forward of one token is taken for the first token that is written: the last token of the prompt
    would then count as generated, and would not be protected with the prompt.

    Examples
    --------
    >>> chunk_without_rest(40, 13), chunk_without_rest(40, 20), chunk_without_rest(40, 1)
    (14, 20, 2)
    """
    chunk = max(2, chunk)
    while columns > 1 and columns % chunk == 1:
        chunk += 1
    return chunk


def check_prompt_lengths(lengths: Sequence[int], max_positions: int | None) -> None:
    """Refuse prompts that hold nothing, or more than the model has positions for.

    Parameters
    ----------
    lengths
        Tokens per prompt, padding not counted.
    max_positions
        Positions the model was made for; ``None`` if it states no limit.

    Raises
    ------
    ConfigError
        Naming the first prompt that cannot be right.
    """
    for row, length in enumerate(lengths):
        which = "the prompt" if len(lengths) == 1 else f"prompt {row + 1} of {len(lengths)}"
        if length < 1:
            raise ConfigError(f"{which} is empty: give at least one token of text.")
        if max_positions is not None and length >= max_positions:
            raise ConfigError(
                f"{which} has {length} tokens, but the model has {max_positions} positions, new tokens "
                "included: shorten the prompt, or use a model made for longer sequences."
            )
