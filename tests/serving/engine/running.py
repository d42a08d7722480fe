"""One vLLM engine in this process: requests put in, steps watched, pages looked at."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from kvkeep.serving.names import LISTENER, name_of
from kvkeep.testbed.shipped import shipped_model

MODEL = str(shipped_model("trace-1"))
#: Without these vLLM starts processes, asks the network, or pins threads.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "OMP_WAIT_POLICY": "PASSIVE",
}
Positions = list[list[list[int]]]  # by layer and KV head, ascending


@dataclass
class Answer:
    """What became of one request.

    Parameters
    ----------
    prompt, tokens
        Read and written.
    log_probabilities
        Of the written tokens.
    held
        Positions that the cache held when the last token was written.
    aborted
        It was taken back.
    """

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    log_probabilities: list[float] = field(default_factory=list)
    held: Positions = field(default_factory=list)
    aborted: bool = False

    @property
    def name(self) -> int:
        """Of the request, for a policy's draws, if its parameters give it none."""
        return name_of(SimpleNamespace(extra_args=None, seed=None), self.prompt)


class Running:
    """An engine that runs.

    Parameters
    ----------
    llm
        A :class:`vllm.LLM` whose engine lives in this process.
    """

    def __init__(self, llm: Any) -> None:
        self.engine = llm.llm_engine
        core = self.engine.engine_core.engine_core
        self.scheduler, self.pool = core.scheduler, core.scheduler.kv_cache_manager.block_pool
        self.runner = core.model_executor.driver_worker.worker.model_runner
        (self.manager,) = core.scheduler.kv_cache_manager.coordinator.single_type_managers
        self._requests = 0

    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        new: int | Sequence[int],
        *,
        watch: Callable[[int, dict[str, Answer]], Sequence[str]] | None = None,
        steps: int | None = None,
        look: bool = False,
        lora: Any = None,
        **sampling: Any,
    ) -> list[Answer]:
        """Put requests in together and run them.

        Parameters
        ----------
        prompts, new
            Token ids, and tokens to write for each.
        watch
            Called after every step with its number and the open answers; the requests that it names are
            aborted.
        steps
            Stop after so many steps and abort the rest.
        look
            Read what the cache holds when a request ends.
        lora
            Adapter that all of them ask for.
        """
        from vllm import SamplingParams

        lengths = [new] * len(prompts) if isinstance(new, int) else list(new)
        answers, inside = {}, {}
        for prompt, length in zip(prompts, lengths, strict=True):
            name, self._requests = str(self._requests), self._requests + 1
            params = SamplingParams(
                **{"temperature": 0, "logprobs": 0, **sampling},
                max_tokens=length,
                ignore_eos=True,
                detokenize=False,
            )
            inside[name] = self.engine.add_request(
                name, {"prompt_token_ids": list(prompt)}, params, lora_request=lora
            )
            answers[name] = Answer(list(prompt))
        open_ = dict(answers)
        step = 0
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                answer, (given,) = answers[output.request_id], output.outputs
                answer.tokens = list(given.token_ids)
                if output.finished:
                    del open_[output.request_id]
                    answer.log_probabilities = [
                        chances[token].logprob
                        for token, chances in zip(given.token_ids, given.logprobs, strict=True)
                    ]
                    if look:
                        answer.held = self.held(inside[output.request_id], answer)
            step += 1
            leave = list(watch(step, open_)) if watch else []
            if step == steps:
                leave = list(open_)
            for name in leave:
                open_.pop(name).aborted = True
            if leave:
                self.engine.abort_request(leave)
        return list(answers.values())

    # -- what vLLM and the plug-in hold -----------------------------------------------------------

    @property
    def layers(self) -> list[Any]:
        """The attention of each layer."""
        return [each.impl for each in self.runner.compilation_config.static_forward_context.values()]

    def held(self, request: str, answer: Answer) -> Positions:
        """Positions of a request's entries, read off the pages of every layer; it has just ended."""
        batch = self.runner.input_batch
        row = batch.block_table[0].block_table.np[batch.req_id_to_index[request]]
        owned = row[row != 0].astype(np.int64)
        schedule = self.manager.schedule
        kept, first = (int(each[0]) for each in schedule.of_rows(np.array([len(owned)])))
        seen = len(answer.prompt) + len(answer.tokens) - 1  # the last token has not been stored
        count = seen if seen <= first else kept + 1 + (seen - 1 - kept) % schedule.buffer
        blocks = torch.from_numpy(owned[schedule.side_blocks :])[None]
        positions = []
        for layer in self.layers:
            noted = layer._cache.pages.read_positions(layer._cache.pages.table(blocks))[0].tolist()
            old = 0 if seen <= first else kept  # what came since the last eviction stands in line
            tail = list(range(seen - count + old, seen))
            positions.append([sorted(head[:old]) + tail for head in noted])
        return positions

    def metric(self, name: str) -> float:
        """One of vLLM's own metrics."""
        (found,) = (each for each in self.engine.get_metrics() if each.name == f"vllm:{name}")
        return float(found.value)

    @property
    def empty(self) -> bool:
        """Whether every block is free, and nothing is remembered of any request."""
        free = self.pool.get_num_free_blocks() == self.pool.num_gpu_blocks - 1
        known = [self.manager.req_to_blocks, getattr(self.manager, "_prompts", {})]
        return free and not any(known)


@contextmanager
def engine(setting: dict[str, Any] | None, *, blocks: int | None = None, **options: Any) -> Iterator[Running]:
    """Start an engine, with kvkeep's setting or without, and so many usable blocks."""
    from vllm import LLM

    given: dict[str, Any] = {"max_model_len": 1024, "block_size": 32, "max_num_seqs": 32, "model": MODEL}
    given |= {"skip_tokenizer_init": True, "logits_processors": [LISTENER]}
    if blocks is not None:
        given["num_gpu_blocks_override"] = blocks + 1  # one is vLLM's null block
    llm = LLM(
        **{**given, **options},
        dtype="float32",
        enforce_eager=True,
        distributed_executor_backend="uni",
        seed=0,
        disable_log_stats=False,
        additional_config={"kvkeep": setting} if setting else {},
    )
    try:
        yield Running(llm)
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
