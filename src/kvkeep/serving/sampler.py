"""kvkeep's draws inside vLLM: the same noise for a sample as in any other engine, batch and order.

vLLM's own seeds would do within one engine, but not across engines, and on a CPU they fail as soon as a
prompt is read in chunks. A processor of logits that leaves the drawn token on top needs neither: requests ask
for the likeliest token (``temperature=0``) and bring their draw along.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from kvkeep.core.errors import ConfigError
from kvkeep.engine.drawing import Draw
from kvkeep.serving.names import FIELD

NAME = f"{__name__}:DrawnTokens"
_KEY = "kvkeep_draw"


def drawn(draw: Draw, sequence_id: int, **params: Any) -> SamplingParams:
    """Parameters of a named request whose tokens are drawn here; needs ``logits_processors=[NAME]``.

    Parameters
    ----------
    draw
        How tokens are drawn.
    sequence_id
        The sample's name for all random numbers.
    params
        What else ``SamplingParams`` takes.
    """
    given: dict[str, Any] = {FIELD: sequence_id}
    if draw.temperature:
        given[_KEY] = [sequence_id, draw.temperature, draw.top_p, draw.top_k]
    return SamplingParams(temperature=0.0, extra_args=given, **params)


class DrawnTokens(LogitsProcessor):  # type: ignore[misc]
    """Puts the token that a request's draw chooses on top; leaves other requests alone."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        # By place in the batch: how to draw, whose noise, and the tokens so far (vLLM's own growing list).
        self._rows: dict[int, tuple[Draw, int, list[int]]] = {}

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Refuse a draw beside vLLM's own.

        Raises
        ------
        ConfigError
            If a request asks for both.
        """
        if _KEY in (sampling_params.extra_args or {}) and sampling_params.temperature != 0:
            raise ConfigError(
                f"a request with {_KEY!r} has temperature {sampling_params.temperature}: use 0, the draw has "
                "a temperature of its own."
            )

    def is_argmax_invariant(self) -> bool:
        """It chooses the token."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow requests that come, go and move."""
        process_dict_updates(self._rows, batch_update, _state)

    def apply(self, logits: Tensor) -> Tensor:
        """Replace the logits of requests that draw, ``[batch, vocabulary]``, by scores."""
        groups: dict[Draw, list[int]] = {}
        for place, (draw, _, _) in self._rows.items():
            groups.setdefault(draw, []).append(place)
        for draw, places in groups.items():
            names = torch.tensor([self._rows[place][1] for place in places], device=logits.device)
            steps = torch.tensor([len(self._rows[place][2]) for place in places], device=logits.device)
            rows = torch.tensor(places, device=logits.device)
            logits[rows] = draw.scores(logits[rows], names, steps)
        return logits


def _state(
    params: SamplingParams, prompt: list[int] | None, written: list[int]
) -> tuple[Draw, int, list[int]] | None:
    given = (params.extra_args or {}).get(_KEY)
    if given is None:
        return None
    name, temperature, top_p, top_k = given
    return Draw(temperature=temperature, top_p=top_p, top_k=top_k), name, written
