"""Heat against loops: the more a text repeats itself, the higher the temperature of its next token."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessor

from kvkeep.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Repetition:
    """Temperature ``T + rise * r``, where ``r`` is the share of repeated n-grams among the newest tokens.

    ``r = 1 - distinct / all`` over the n-grams of the last ``window`` tokens that the sequence has written; 0
    while there are fewer than two of them. It is counted for each sequence by itself, over its own answer,
    the prompt left out. Right chains of the built-in reasoner have r = 0.01 on average (n-grams of 4, window
    64); a loop of ten tokens has 0.84.

    Parameters
    ----------
    rise
        Added to the temperature of a text that only repeats itself. 0 is off.
    ngram, window
        Tokens per n-gram, and newest tokens that are looked at.

    Source
    ------
    Ours, for the study of the design space.

    Examples
    --------
    >>> heat = Repetition(rise=2.0, ngram=2, window=5)
    >>> heat.temperature(0.5, [9, 1, 2, 1, 2, 1])  # 12, 21, 12, 21: two of four are repeats
    1.5
    """

    rise: float
    ngram: int = 4
    window: int = 64

    def __post_init__(self) -> None:
        if not 0 <= self.rise < float("inf"):
            raise ConfigError(f"repetition_rise {self.rise} is not 0 or more: 0 is off.")
        if self.ngram < 1:
            raise ConfigError(f"repetition_ngram {self.ngram} is below 1 token.")
        if self.window <= self.ngram:
            raise ConfigError(
                f"repetition_window {self.window} holds no two n-grams of {self.ngram} tokens: use at least "
                f"{self.ngram + 1}."
            )

    def share(self, written: Sequence[Hashable]) -> float:
        """``r`` of a text, from 0 to below 1."""
        newest = written[-self.window :]
        count = len(newest) - self.ngram + 1
        if count < 2:
            return 0.0
        return 1 - len({tuple(newest[i : i + self.ngram]) for i in range(count)}) / count

    def temperature(self, usual: float, written: Sequence[Hashable]) -> float:
        """The temperature of the next token of a text."""
        return usual + self.rise * self.share(written)


class RepetitionWarper(LogitsProcessor):  # type: ignore[misc]
    """The same for ``model.generate``, which divides by its own temperature ``T`` too.

    Parameters
    ----------
    heat
        How much, over what.
    usual
        Temperature that ``model.generate`` samples with.
    prompt
        Columns of the prompt, which do not count.

    Raises
    ------
    ConfigError
        If nothing is sampled.
    """

    def __init__(self, heat: Repetition, usual: float, prompt: int) -> None:
        if usual <= 0:
            raise ConfigError(
                "repetition asks for a temperature, and model.generate takes the likeliest token: set "
                "do_sample=True and a temperature above 0."
            )
        self.heat, self.usual, self.prompt = heat, usual, prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        written = input_ids[:, self.prompt :].tolist()
        warmth = [self.heat.temperature(self.usual, tokens) / self.usual for tokens in written]
        return scores / torch.tensor(warmth, device=scores.device, dtype=scores.dtype)[:, None]
