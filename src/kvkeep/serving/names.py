"""Who a request is, for a policy's random numbers: vLLM tells attention nothing but lengths and blocks."""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

#: In a request's ``extra_args`` (``vllm_xargs`` over HTTP): a name of its own, a whole number.
FIELD = "kvkeep_sequence"
#: What ``--logits-processors`` takes.
LISTENER = "kvkeep.serving.listening:RequestNames"


def name_of(params: Any, prompt: Sequence[int] | None) -> int:
    """A request's name, which survives preemption and needs no other request.

    Parameters
    ----------
    params
        ``SamplingParams``: a name that is given there is taken, and a seed enters the hash.
    prompt
        Its token ids; ``None`` if it has embeddings instead.

    Returns
    -------
    int
        64 bits, signed.
    """
    given = (params.extra_args or {}).get(FIELD)
    if given is not None:
        return int(given)
    digest = blake2b(array("q", prompt or ()).tobytes(), digest_size=8)
    if params.seed is not None:
        digest.update(f"seed {params.seed}".encode())
    return int.from_bytes(digest.digest(), "little", signed=True)


def require_name(params: Any) -> None:
    """Refuse a name that is none.

    Raises
    ------
    ValueError
        Which vLLM hands to the client.
    """
    given = (params.extra_args or {}).get(FIELD)
    whole = isinstance(given, int) and not isinstance(given, bool)
    if given is not None and not (whole and -(2**63) <= given < 2**63):
        raise ValueError(f"{FIELD!r} is {given!r}: give a whole number of 64 bits with its sign, or none.")


class Rows:
    """Names by row of a worker's batch, for the engine of one configuration.

    Parameters
    ----------
    vllm_config
        Of the engine; as long as this lives, no other configuration has its id.
    """

    def __init__(self, vllm_config: Any) -> None:
        self.names: dict[int, int] = {}
        self._config = vllm_config
        _KNOWN[id(vllm_config)] = self


# By identity of the configuration: several engines may take turns in one process.
_KNOWN: weakref.WeakValueDictionary[int, Rows] = weakref.WeakValueDictionary()


def rows_of(vllm_config: Any) -> Rows | None:
    """The rows of this worker's engine; ``None`` if nobody listens."""
    return _KNOWN.get(id(vllm_config))
