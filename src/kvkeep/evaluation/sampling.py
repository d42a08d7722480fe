"""How answers are written: temperature and lengths, by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kvkeep.core.errors import ConfigError, UnknownNameError
from kvkeep.engine.drawing import Draw
from kvkeep.engine.repetition import Repetition
from kvkeep.evaluation.refeeding import Refeeding


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn and how long a text may become.

    Parameters
    ----------
    preset
        Name of the settings, for the run's header.
    temperature
        0 is greedy.
    top_p, top_k
        Draw from the smallest set of this probability, and from so many tokens at most (0: all).
    max_total
        Longest prompt and answer together, in tokens; ``None`` for no limit.
    max_new
        Longest answer, in tokens; ``None`` for no limit.
    repetition_rise, repetition_ngram, repetition_window
        The temperature rises with the repetition in the answer, by so much at most, over such n-grams of so
        many newest tokens: :class:`~kvkeep.engine.repetition.Repetition`. 0 is off.
    refeed_every, refeed_evictions
        Read the prompt again after so many tokens or evictions:
        :class:`~kvkeep.evaluation.refeeding.Refeeding`. ``None`` is off.
    """

    preset: str = "custom"
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    max_total: int | None = None
    max_new: int | None = None
    repetition_rise: float = 0.0
    repetition_ngram: int = 4
    repetition_window: int = 64
    refeed_every: int | None = None
    refeed_evictions: int | None = None
    lengths: dict[str, int] = field(default_factory=dict, repr=False)  # max_total by task

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ConfigError(f"temperature {self.temperature} is negative: 0 is greedy.")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top-p {self.top_p} is outside (0, 1]: 1 draws from all tokens.")
        if self.top_k < 0:
            raise ConfigError(f"top-k {self.top_k} is negative: 0 draws from all tokens.")
        for name in ("max_total", "max_new"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} {value} leaves no room for a token.")
        _ = self.heat, self.refeeding  # which check their numbers
        if self.repetition_rise == 0 and (self.repetition_ngram, self.repetition_window) != (4, 64):
            raise ConfigError("repetition_ngram and repetition_window say nothing without repetition_rise.")

    @property
    def greedy(self) -> bool:
        """Whether the same prompt always gives the same text."""
        return self.temperature == 0 and self.repetition_rise == 0

    @property
    def heat(self) -> Repetition | None:
        """How repetition warms the draws; ``None``: it does not."""
        heat = Repetition(
            rise=self.repetition_rise, ngram=self.repetition_ngram, window=self.repetition_window
        )
        return heat if heat.rise else None

    @property
    def refeeding(self) -> Refeeding | None:
        """When the prompt is read again; ``None``: never."""
        plan = Refeeding(every=self.refeed_every, evictions=self.refeed_evictions)
        return None if plan == Refeeding() else plan

    @property
    def draw(self) -> Draw:
        """How a token is drawn."""
        return Draw(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k)

    def for_task(self, name: str, max_new: int | None) -> Sampling:
        """The lengths that the preset states for a task, or the task's own."""
        total = self.lengths.get(name, self.max_total)
        own = self.max_new if self.max_new is not None or total is not None else max_new
        return replace(self, max_total=total, max_new=own, lengths={})

    def new_tokens(self, prompt_tokens: int, max_positions: int | None) -> int:
        """Most tokens that may follow a prompt of so many.

        Raises
        ------
        ConfigError
            If the prompt leaves no room, or nothing limits the length.
        """
        room = [self.max_new] if self.max_new is not None else []
        room += [total - prompt_tokens for total in (self.max_total, max_positions) if total is not None]
        if not room:
            raise ConfigError("nothing limits the length of the answers: give max_new or max_total.")
        if min(room) < 1:
            raise ConfigError(
                f"a prompt of {prompt_tokens} tokens leaves no room for an answer (max_total="
                f"{self.max_total}, model positions {max_positions}): raise max_total or use a longer model."
            )
        return min(room)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready; what is off is left out, as in logs that are older than it."""
        facts = asdict(self)
        del facts["lengths"]
        if self.heat is None:
            del facts["repetition_rise"], facts["repetition_ngram"], facts["repetition_window"]
        return {
            name: value for name, value in facts.items() if value is not None or not name.startswith("refeed")
        }


_MATHS = ("gsm8k", "math500")
_AIME = ("aime24", "aime25", "aime26", "hmmt25")

_PRESETS = (
    Sampling(preset="greedy"),
    Sampling(preset="trace", temperature=0.6, top_p=0.95),
    Sampling(preset="vase", temperature=0.6, top_p=0.95, max_total=32_768, lengths={"gsm8k": 4_096}),
    Sampling(
        preset="triattention",
        temperature=0.6,
        top_p=0.95,
        max_total=32_768,
        lengths=dict.fromkeys(_MATHS, 8_192),
    ),
    Sampling(
        preset="rkv",
        max_total=16_384,
        lengths=dict.fromkeys(_MATHS, 8_192),
    ),
    # The papers of TrimKV keep each model's own generation settings; these are those of Qwen3.
    Sampling(preset="trimkv", temperature=0.6, top_p=0.95, top_k=20, max_new=32_768),
)

SAMPLING = {preset.preset: preset for preset in _PRESETS}


def sampling_preset(name: str) -> Sampling:
    """Look settings up.

    Raises
    ------
    UnknownNameError
        If there are none of that name.
    """
    if name not in SAMPLING:
        raise UnknownNameError("sampling preset", name, SAMPLING)
    return SAMPLING[name]


class Sampler:
    """Draws the next token of each row.

    Parameters
    ----------
    sampling
        Temperature, top-p and top-k, and how repetition warms them.
    """

    def __init__(self, sampling: Sampling) -> None:
        self._draw, self._heat = sampling.draw, sampling.heat

    def choose(
        self,
        logits: Tensor,
        sequence_ids: Tensor,
        steps: int | Tensor,
        written: Sequence[Sequence[int]] = (),
    ) -> Tensor:
        """Choose a token for each row.

        Parameters
        ----------
        logits
            ``[batch, vocabulary]``.
        sequence_ids
            int64 ``[batch]``: names of the rows.
        steps
            Tokens that the rows have written before: int64 ``[batch]``, or one number for all.
        written
            Those tokens, row by row; looked at where repetition matters.

        Returns
        -------
        Tensor
            int64 ``[batch]``.
        """
        if isinstance(steps, int):
            steps = torch.full_like(sequence_ids, steps)
        temperatures = None
        if self._heat is not None:
            warm = [self._heat.temperature(self._draw.temperature, tokens) for tokens in written]
            temperatures = torch.tensor(warm, dtype=torch.float32, device=logits.device)
        return self._draw.scores(logits, sequence_ids, steps, temperatures).argmax(-1)
