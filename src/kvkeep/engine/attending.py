"""Another attention function for a while, in training and in tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvkeep.engine.attention import attention_name, set_attention


@contextmanager
def attending(
    model: PreTrainedModel,
    name: str,
    function: Callable[..., tuple[Tensor, Tensor | None]],
    mask: Callable[..., Tensor | None],
) -> Iterator[None]:
    """Let a model that chooses its attention by name attend by ``function``; afterwards as before.

    Parameters
    ----------
    name
        Under which transformers finds both functions: one name for one pair.
    function
        Attention of one layer, as transformers calls it.
    mask
        Makes the mask it is called with; transformers drops causality without one.
    """
    if name not in ALL_ATTENTION_FUNCTIONS:
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, mask)
        ALL_ATTENTION_FUNCTIONS.register(name, function)
    before = attention_name(model)
    set_attention(model, name)
    try:
        yield
    finally:
        set_attention(model, before)


def explicit_mask(**options: Any) -> Tensor | None:
    """Causality and padding as a mask in every case: never left to the kernel."""
    return sdpa_mask(**(options | {"allow_is_causal_skip": False}))
