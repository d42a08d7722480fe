"""A vLLM engine in this process for measurements: it writes answers, and says what each one held.

How much a request holds follows from its lengths and the schedule (:class:`~kvkeep.serving.account.Account`).
The workers count on their own what they carried out, and both must agree, else nothing is returned.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from kvkeep.core.errors import CacheIntegrityError, ConfigError, MissingExtraError
from kvkeep.core.policy import Policy
from kvkeep.engine.drawing import Draw
from kvkeep.serving.account import Account
from kvkeep.serving.ledger import LEDGER
from kvkeep.serving.schedule import Schedule
from kvkeep.serving.settings import KEY
from kvkeep.serving.spelling import spelled

# vLLM reads these when it is imported. In one process a run repeats and an interrupt ends it.
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
# Set here, because texts or measurements would be wrong with anything else.
_OWN = (
    "additional_config",
    "async_scheduling",
    "disable_log_stats",
    "dtype",
    "logits_processors",
    "model",
    "skip_tokenizer_init",
    "speculative_config",
    "worker_extension_cls",
)


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
        With every reason, if the policy cannot be served or kvkeep is not in charge.
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
        given = dict(options or {})
        if own := sorted(given.keys() & set(_OWN)):
            raise ConfigError(f"the engine option {own[0]!r} is decided by kvkeep: leave it out.")
        prepare()
        from vllm import LLM

        from kvkeep.serving.charge import check

        setting = {KEY: spelled(policy, calibration=calibration)} if policy.bounded else {}
        LEDGER.open(None)  # an engine before this one, in this process, may have left its counts
        self._llm: Any = LLM(model=model, **_arguments(policy, dtype, max_len, setting) | given)
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
            compare(self._measured(), [answer.account for answer in answers])
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


def prepare() -> None:
    """Set what vLLM reads from the environment, where the user has not.

    Raises
    ------
    MissingExtraError
        If vLLM is not installed.
    """
    if find_spec("vllm") is None:
        raise MissingExtraError("vllm", "vllm", "the engine vllm")
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def compare(measured: Mapping[str, Any], accounts: Sequence[Account]) -> None:
    """Hold what the workers counted against the accounts of all requests.

    Raises
    ------
    CacheIntegrityError
        Naming what differs.
    """
    due = {
        name: sum(getattr(account, name) for account in accounts)
        for name in ("steps", "entries", "evictions", "evicted")
    }
    differ = [
        f"{name} {measured[name]} and {value}" for name, value in due.items() if measured[name] != value
    ]
    highest = max((account.highest for account in accounts), default=0)
    if measured["peak_entries"] < highest:  # heads of different length may hold more than their share
        differ.append(f"peak {measured['peak_entries']} and {highest}")
    if differ:
        raise CacheIntegrityError(
            f"vLLM's workers counted otherwise than the lengths of {len(accounts)} answers say: "
            f"{'; '.join(differ)}. Requests may have been preempted: give the engine more memory, or fewer "
            "requests at once (--engine-option max_num_seqs=N)."
        )


def _arguments(policy: Policy, dtype: str, max_len: int | None, setting: dict[str, Any]) -> dict[str, Any]:
    """Arguments of ``vllm.LLM``."""
    from vllm.platforms import current_platform

    from kvkeep.serving.sampler import NAME

    arguments: dict[str, Any] = {
        "dtype": dtype,
        "max_model_len": max_len,
        "skip_tokenizer_init": True,
        "seed": 0,
        # A sample must depend on its own prompt alone, and a step in flight is one that nobody asked for.
        "enable_prefix_caching": False,
        "async_scheduling": False,
        "logits_processors": [NAME],
        "worker_extension_cls": "kvkeep.serving.ledger.LedgerReader",
        "additional_config": setting,
        "disable_log_stats": True,
    }
    if current_platform.is_cpu():
        arguments |= {"enforce_eager": True, "distributed_executor_backend": "uni"}
        # The smallest that CPUs take: kept prompts are rounded up to whole blocks.
        arguments["block_size"] = 32
    elif policy.bounded:
        arguments["attention_backend"] = "CUSTOM"
    return arguments
