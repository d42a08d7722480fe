"""kvkeep inside vLLM: a plug-in that changes no line of it.

vLLM imports this package in each of its processes, also where kvkeep is not set: nothing is imported here.
:func:`kvkeep.serving.plugin.register` is what vLLM calls.
"""

from __future__ import annotations

from typing import Any


def check(engine: Any) -> bool:
    """Ask a running engine whether kvkeep bounds its cache: see :func:`kvkeep.serving.charge.check`."""
    from kvkeep.serving import charge

    return charge.check(engine)


__all__ = ["check"]
