"""One run: prompts in, text out as it is written, and what was measured on the way."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import TextStreamer, set_seed
from transformers.generation.streamers import BaseStreamer

from kvkeep.cli.loading import Loaded
from kvkeep.core.errors import ConfigError
from kvkeep.core.policy import Policy
from kvkeep.core.precision import Precision
from kvkeep.engine.generation import generate
from kvkeep.engine.repetition import Repetition
from kvkeep.engine.trace import Trace


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to write.

    Parameters
    ----------
    max_new_tokens
        Most tokens per prompt.
    temperature
        0 takes the likeliest token each time.
    top_p
        Sample among the likeliest tokens that hold so much probability together.
    repetition_rise
        Added to the temperature of a text that only repeats itself; 0 is off.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    repetition_rise: float = 0.0

    def __post_init__(self) -> None:
        for name, wrong, allowed in (
            ("max-new-tokens", self.max_new_tokens < 1, "at least 1"),
            ("temperature", not 0 <= self.temperature < float("inf"), "0 (no sampling) or more"),
            ("top-p", not 0 < self.top_p <= 1, "above 0, at most 1"),
        ):
            if wrong:
                value = getattr(self, name.replace("-", "_"))
                raise ConfigError(f"--{name} {value} is out of range: {allowed}.")
        if self.repetition_rise and self.temperature == 0:
            raise ConfigError(
                "--repetition-rise raises a temperature, and without one the likeliest token is taken: add "
                "--temperature."
            )

    def options(self) -> dict[str, Any]:
        """For ``model.generate``."""
        if self.temperature == 0:
            return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        heat = Repetition(rise=self.repetition_rise)
        return {
            "do_sample": True,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": 0,
            "repetition": heat if heat.rise else None,
        }


@dataclass(frozen=True, kw_only=True)
class Run:
    """What came out.

    Parameters
    ----------
    texts
        One answer per prompt.
    prompt_tokens, new_tokens
        Per prompt.
    read_seconds, write_seconds
        Until the first new token, and from it to the last.
    trace
        Measured memory.
    beyond
        Tokens of the longest sequence that lie beyond the positions the model was made for.
    """

    texts: list[str]
    prompt_tokens: list[int]
    new_tokens: list[int]
    read_seconds: float
    write_seconds: float
    trace: Trace
    beyond: int = 0

    @property
    def tokens_per_second(self) -> float | None:
        """New tokens of all sequences after their first, per second; ``None`` if there were none."""
        later = sum(self.new_tokens) - len(self.new_tokens)
        return later / self.write_seconds if later > 0 and self.write_seconds > 0 else None


class _Watch(BaseStreamer):
    """Notes the time of every step, and passes the text on while it is written."""

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None] | None, on_step: Callable[[], None]):
        self.times: list[float] = []
        self.on_step = on_step
        self.writer = _Writer(tokenizer, on_text) if on_text is not None else None

    def put(self, value: Tensor) -> None:
        """The prompt first, then the new tokens of one step."""
        self.times.append(time.perf_counter())
        if len(self.times) > 1:
            self.on_step()
        if self.writer is not None:
            self.writer.put(value)

    def end(self) -> None:
        """No more tokens."""
        if self.writer is not None:
            self.writer.end()


class _Writer(TextStreamer):
    def __init__(self, tokenizer: Any, on_text: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.on_text = on_text

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.on_text(text)


def encode(loaded: Loaded, prompts: list[str], chat: bool | None) -> dict[str, Tensor]:
    """Token ids and mask, padded on the left; in the chat template if there is one, or as asked.

    Raises
    ------
    ConfigError
        If a chat was asked for and the model has no template.
    """
    tokenizer = loaded.tokenizer
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if chat and not has_template:
        raise ConfigError(f"{loaded.name} has no chat template: use --no-chat.")
    as_chat = has_template if chat is None else chat
    if as_chat:
        prompts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
            )
            for prompt in prompts
        ]
    encoded = tokenizer(
        prompts, return_tensors="pt", padding=len(prompts) > 1, add_special_tokens=not as_chat
    )
    return {name: encoded[name].to(loaded.model.device) for name in ("input_ids", "attention_mask")}


def answer(
    loaded: Loaded,
    policy: Policy,
    prompts: list[str],
    sampling: Sampling,
    *,
    chat: bool | None = None,
    seed: int = 0,
    calibration: Any = None,
    gates: Any = None,
    store: str = "auto",
    precision: Precision | None = None,
    prefill_chunk: int | None = None,
    on_text: Callable[[str], None] | None = None,
    on_step: Callable[[], None] = lambda: None,
) -> Run:
    """Answer the prompts as one batch.

    Parameters
    ----------
    on_text
        Called with pieces of the answer as they are written (one prompt only).
    on_step
        Called after each step, the first of which reads the prompt.
    """
    inputs = encode(loaded, prompts, chat)
    options = sampling.options()
    if prefill_chunk is not None:
        options["prefill_chunk_size"] = prefill_chunk
    watch = _Watch(loaded.tokenizer, on_text, on_step)
    set_seed(seed % 2**32)
    begin = time.perf_counter()
    with torch.inference_mode():
        output, cache = generate(
            loaded.model,
            policy,
            inputs,
            max_new_tokens=sampling.max_new_tokens,
            seed=seed,
            calibration=calibration,
            gates=gates,
            precision=precision,
            store=store,  # type: ignore[arg-type]  # checked by the cache
            streamer=watch,
            pad_token_id=loaded.tokenizer.pad_token_id,
            **options,
        )
    new = [_until_end(row, loaded.model) for row in output[:, inputs["input_ids"].shape[1] :].tolist()]
    prompt_tokens = [int(count) for count in inputs["attention_mask"].sum(-1).tolist()]
    longest = max(read + len(row) for read, row in zip(prompt_tokens, new, strict=True))
    return Run(
        texts=[loaded.tokenizer.decode(row, skip_special_tokens=True) for row in new],
        prompt_tokens=prompt_tokens,
        new_tokens=[len(row) for row in new],
        read_seconds=watch.times[1] - begin,
        write_seconds=watch.times[-1] - watch.times[1],
        trace=cache.trace,
        beyond=max(0, longest - (cache.spec.max_positions or longest)),
    )


def _until_end(tokens: list[int], model: Any) -> list[int]:
    """Cut the padding that follows a sequence which ended before its neighbours."""
    ends = model.generation_config.eos_token_id
    ends = {ends} if isinstance(ends, int) else set(ends or ())
    stop = next((place + 1 for place, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[:stop]
