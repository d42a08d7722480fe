"""Where texts come from: a model of transformers under a policy."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvkeep.core.errors import ConfigError
from kvkeep.core.policy import Policy
from kvkeep.core.precision import Precision
from kvkeep.engine.retention_cache import RetentionCache
from kvkeep.engine.spec import model_spec
from kvkeep.evaluation.asking import as_text, encode, header_facts
from kvkeep.evaluation.decoding import Written, decode
from kvkeep.evaluation.eviction_log import EvictionLog
from kvkeep.evaluation.identity import weights_sha256
from kvkeep.evaluation.jobs import Completion, Job
from kvkeep.evaluation.prompts import PromptTemplate
from kvkeep.evaluation.sampling import Sampler, Sampling


class ModelGenerator:
    """A model of transformers under a policy.

    Parameters
    ----------
    model, tokenizer
        A causal language model and its tokenizer.
    name
        What to call the model in the run's header.
    policy
        What to keep; its budget must be a count.
    template
        How a question becomes a prompt.
    sampling
        How tokens are drawn, and length limits.
    calibration, gates
        For policies that need them.
    precision
        Entries in few bits.
    prefill_chunk
        Read prompts so many tokens at a time.
    log_evictions
        Note what every eviction takes away, in ``extra["evicted"]`` of the completions.

    Raises
    ------
    ConfigError
        If the budget is a ratio or a size: what it comes to would depend on the batch.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str,
        policy: Policy,
        template: PromptTemplate,
        sampling: Sampling,
        calibration: Any = None,
        gates: Any = None,
        precision: Precision | None = None,
        prefill_chunk: int | None = None,
        log_evictions: bool = False,
    ) -> None:
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self.policy, self.template, self.sampling = checked(policy), template, sampling
        self.calibration, self.gates, self.prefill_chunk = calibration, gates, prefill_chunk
        self.log_evictions = log_evictions
        self.precision = precision
        self._spec = model_spec(model.config)
        self._end_tokens = end_tokens(model, tokenizer)
        self._weights: str | None = None

    def with_policy(self, policy: Policy) -> ModelGenerator:
        """The same model under another policy."""
        other = copy.copy(self)
        other.policy = checked(policy)
        return other

    def with_precision(self, precision: Precision | None) -> ModelGenerator:
        """The same model, storing in another way."""
        other = copy.copy(self)
        other.precision = precision
        return other

    def with_sampling(self, sampling: Sampling) -> ModelGenerator:
        """The same model, drawing in another way."""
        other = copy.copy(self)
        other.sampling = sampling
        return other

    @property
    def random(self) -> bool:
        return not self.sampling.greedy or self.policy.traits.random

    def count_tokens(self, text: str) -> int:
        return len(self._encode(text))

    def facts(self) -> dict[str, Any]:
        if self._weights is None:
            self._weights = weights_sha256(self.model)
        return header_facts(
            name=self.name,
            weights_sha256=self._weights,
            policy=self.policy,
            template=self.template,
            tokenizer=self.tokenizer,
            sampling=self.sampling,
            calibration_sha256=None if self.calibration is None else str(self.calibration.sha256),
            gates_sha256=None if self.gates is None else str(self.gates.sha256),
            precision=self.precision,
            extra={
                "dtype": str(self.model.dtype).removeprefix("torch."),
                "prefill_chunk": self.prefill_chunk,
            },
        )

    def generate(self, jobs: Sequence[Job]) -> Iterator[Completion]:
        prompts = [self._encode(self.template.render(job.problem.question, self.tokenizer)) for job in jobs]
        limits = [self.sampling.new_tokens(len(prompt), self._spec.max_positions) for prompt in prompts]
        device = self.model.device
        ids, mask = (tensor.to(device) for tensor in pad_left(prompts, self._padding()))
        log = EvictionLog() if self.log_evictions else None
        cache = RetentionCache(
            self.model,
            self.policy,
            sequence_ids=[job.sequence_id for job in jobs],
            calibration=self.calibration,
            gates=self.gates,
            precision=self.precision,
            trace_rows=True,
            on_eviction=log,
        )
        for written in decode(
            self.model,
            cache,
            ids,
            mask,
            limits=limits,
            end_tokens=self._end_tokens,
            sampler=Sampler(self.sampling),
            chunk=self.prefill_chunk,
            refeeding=self.sampling.refeeding,
            spare=self._spare(prompts, limits),
        ):
            job, prompt = jobs[written.row], prompts[written.row]
            completion = self._completion(job, len(prompt), written, cache, len(jobs))
            if log is not None:
                completion.extra["evicted"] = log.of(job.sequence_id, written.readings, len(prompt))
            yield completion

    def close(self) -> None:
        """Nothing to end: the model goes with its last user."""

    def _completion(
        self, job: Job, prompt_tokens: int, written: Written, cache: RetentionCache, rows: int
    ) -> Completion:
        trace = written.trace
        refed = {} if self.sampling.refeeding is None else {"refed": written.refed}
        return Completion(
            job=job,
            text=as_text(written.tokens, self.tokenizer),
            tokens=written.tokens,
            ended=written.ended,
            prompt_tokens=prompt_tokens,
            steps=trace.steps,
            mean_cache=trace.mean_entries,
            peak_cache=trace.peak_entries,
            prefill_cache=trace.prefill_entries,
            mean_read=trace.mean_read,
            peak_read=trace.peak_read,
            mean_memory=trace.mean_memory,
            peak_memory=trace.peak_memory,
            prefill_memory=trace.prefill_memory,
            evictions=trace.evictions,
            seconds=written.read_seconds + written.write_seconds,
            write_seconds=written.write_seconds,
            extra={
                "batch": rows,
                "batch_peak_kv_bytes": cache.trace.peak_kv_bytes,
                "mean_read_by_query": trace.mean_read_by_query,
            }
            | refed,
        )

    def _spare(self, prompts: Sequence[Sequence[int]], limits: Sequence[int]) -> list[int] | None:
        """Positions that are left beside each prompt and its longest answer."""
        most = self._spec.max_positions
        if most is None:
            return None
        return [most - len(prompt) - limit for prompt, limit in zip(prompts, limits, strict=True)]

    def _encode(self, text: str) -> list[int]:
        return encode(text, self.template, self.tokenizer)

    def _padding(self) -> int:
        padding = self.tokenizer.pad_token_id
        return int(padding if padding is not None else next(iter(self._end_tokens), 0))


def checked(policy: Policy) -> Policy:
    """Refuse a budget that is no count.

    Raises
    ------
    ConfigError
        A ratio or a size would come to another count in every batch.
    """
    if policy.bounded and not policy.amount.resolved:
        raise ConfigError(
            f"the budget '{policy.amount}' comes to another count in every batch: give a number of entries."
        )
    return policy


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every token that ends a text: those of the generation config and the tokenizer's own."""
    configured = model.generation_config.eos_token_id if model.generation_config is not None else None
    listed = configured if isinstance(configured, list) else [configured]
    return frozenset(int(token) for token in (*listed, tokenizer.eos_token_id) if token is not None)


def pad_left(prompts: Sequence[Sequence[int]], padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask ``[batch, longest]``, padded on the left.

    Raises
    ------
    ConfigError
        If a prompt is empty.
    """
    if not all(prompts):
        raise ConfigError("a prompt is empty: give at least one token of text.")
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.full((len(prompts), longest), padding)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    return ids, mask
