"""A vLLM engine in this process for measurements: it writes answers, and says what each one held.

How much a request holds follows from its lengths and the schedule (:class:`~kvkeep.serving.account.Account`).
The workers count on their own what they carried out, and both must agree, else nothing is returned.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvkeep.core.errors import (
    CacheIntegrityError,
    KvkeepError,
    ScoreError,
    UnsupportedError,
)
from kvkeep.core.policy import Policy
from kvkeep.engine.drawing import Draw
from kvkeep.serving.account import Account, require_agreement
from kvkeep.serving.contained import CONTAINED
from kvkeep.serving.launching import arguments_of, own_settings_left_alone, prepare
from kvkeep.serving.ledger import LEDGER
from kvkeep.serving.refusals import NO_SELECTORS
from kvkeep.serving.schedule import Schedule
from kvkeep.serving.settings import KEY
from kvkeep.serving.spelling import spelled


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt.

    Parameters
    ----------
    tokens
        Of the prompt.
    limit
        Most tokens to write, an end token included.
    sequence_id
        The sample's name for all random numbers.
    """

    tokens: Sequence[int]
    limit: int
    sequence_id: int


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What was written to one prompt.

    Parameters
    ----------
    tokens
        The end token left out.
    ended
        By an end token, not at the limit.
    account
        What the request held.
    """

    tokens: list[int]
    ended: bool
    account: Account


class OfflineEngine:
    """vLLM over one model and at most one policy.

    Parameters
    ----------
    model
        Folder or hub id.
    policy
        What to keep; one that keeps everything runs vLLM as it is.
    calibration
        File of statistics, for policies that need them.
    dtype
        Of the model.
    max_len
        Longest prompt and answer together, in tokens.
    options
        Further arguments of ``vllm.LLM``.

    Raises
    ------
    MissingExtraError
        If vLLM is not installed.
    ConfigError
        If an option is one that is decided here.
    UnsupportedError
        With every reason, if the policy cannot be served, kvkeep is not in charge, or vLLM does not start.
    """

    def __init__(
        self,
        model: str,
        *,
        policy: Policy,
        calibration: str | None = None,
        dtype: str = "float32",
        max_len: int | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if policy.traits.reads is not None:  # vLLM would start, and serve the full cache
            raise UnsupportedError(f"{policy.name} cannot run inside vLLM", [NO_SELECTORS])
        given = own_settings_left_alone(options or {})
        prepare()
        from vllm import LLM

        from kvkeep.serving.charge import check

        setting = {KEY: spelled(policy, calibration=calibration)} if policy.bounded else {}
        LEDGER.open(None)  # an engine before this one, in this process, may have left its counts
        CONTAINED.evictions = 0
        arguments = arguments_of(policy, dtype, max_len, setting) | given
        try:
            self._llm: Any = LLM(model=model, **arguments)
        except KvkeepError:
            raise
        except Exception as error:  # whatever vLLM trips over: settings, memory, files of the model
            raise UnsupportedError(
                "vLLM did not start with these settings", [_last_line(error), f"they were {arguments}"]
            ) from error
        check(self._llm)
        self.block_size = int(self._llm.llm_engine.vllm_config.cache_config.block_size)
        self.schedule = self._measured()["schedule"] if policy.bounded else None
        if policy.bounded and self.schedule is None:
            raise CacheIntegrityError(
                "the setting is there, but no worker of this engine counts: is vLLM patched?"
            )

    def write(self, requests: Sequence[Request], *, draw: Draw, ends: Iterable[int]) -> list[Answer]:
        """Write all answers.

        Parameters
        ----------
        draw
            How tokens are drawn.
        ends
            Tokens that end an answer.

        Raises
        ------
        CacheIntegrityError
            If the workers counted something else than the lengths of the answers say.
        ScoreError
            If a policy's scores were no numbers: a server goes on without them, a measurement does not.
        """
        from kvkeep.serving.sampler import drawn

        stops = frozenset(ends)
        params = [
            drawn(
                draw,
                request.sequence_id,
                max_tokens=request.limit,
                stop_token_ids=sorted(stops),
                ignore_eos=True,  # the end tokens are those given, whatever the model's files say
                detokenize=False,
            )
            for request in requests
        ]
        prompts = [{"prompt_token_ids": list(request.tokens)} for request in requests]
        self._llm.collective_rpc("kvkeep_reset")
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        answers = [
            self._answer(request, list(output.outputs[0].token_ids), stops)
            for request, output in zip(requests, outputs, strict=True)
        ]
        if self.schedule is not None:
            require_agreement(self._measured(), [answer.account for answer in answers])
            if any(self._llm.collective_rpc("kvkeep_contained")):
                raise ScoreError(
                    "the policy's scores of a request were NaN, and its newest entries were kept instead "
                    "(the log names layer and policy): nothing of this batch is used. Try float32, or "
                    "another policy."
                )
        return answers

    def close(self) -> None:
        """End the engine and free its memory."""
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
            self._llm = None
            gc.collect()

    def _answer(self, request: Request, tokens: list[int], stops: frozenset[int]) -> Answer:
        if not tokens:
            raise CacheIntegrityError("vLLM returned an answer without a token: the request was aborted.")
        account = Account.of(self.schedule, prompt=len(request.tokens), generated=len(tokens))
        ended = tokens[-1] in stops
        return Answer(tokens=tokens[:-1] if ended else tokens, ended=ended, account=account)

    def _measured(self) -> dict[str, Any]:
        """What each worker counted; all of them must say the same."""
        first, *others = self._llm.collective_rpc("kvkeep_ledger")
        if any(other != first for other in others):
            raise CacheIntegrityError(f"workers of one engine counted differently: {[first, *others]}.")
        schedule = first["schedule"]
        return {**first, "schedule": None if schedule is None else Schedule(**schedule)}


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else 'no message'}"
