"""A logits processor of vLLM that changes no logits, and hears which request stands in which row.

vLLM's model runner V1 tells its logits processors of every request that joins, leaves or moves in a worker's
batch, with prompt and sampling parameters, before a step is prepared: in every worker, on any rank. This one
is named on the command line and not announced as an entry point: model runner V2 looks through those, and
stops every engine of an environment in which it finds one of V1's kind.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from kvkeep.serving.names import Rows, name_of, require_name


class RequestNames(LogitsProcessor):  # type: ignore[misc]
    """Names of requests by row, for policies that draw."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        self.rows = Rows(vllm_config)

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Refuse a name that is none."""
        require_name(sampling_params)

    def is_argmax_invariant(self) -> bool:
        """It changes nothing."""
        return True

    def apply(self, logits: Tensor) -> Tensor:
        """The logits as they are."""
        return logits

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow requests that come, go and move."""
        process_dict_updates(
            self.rows.names, batch_update, lambda params, prompt, written: name_of(params, prompt)
        )
