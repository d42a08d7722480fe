"""The line that says at start what kvkeep does to an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.core.budget import format_bytes

if TYPE_CHECKING:
    from kvkeep.serving.spec import BoundedSpec

INACTIVE = "kvkeep inactive: installed, but --additional-config has no 'kvkeep', so the full cache is served"

_PROMPTS = {
    "chunk": "",
    "defer": " (more while a longer prompt is read)",
    "kept": " besides those of its prompt",
}


def start_line(spec: BoundedSpec, usable: int, prefix_caching: bool) -> str:
    """Policy, memory of a request before and after, and how many fit.

    Parameters
    ----------
    spec
        Of the managed layers.
    usable
        Blocks of the engine's pool that requests can own.
    prefix_caching
        Whether vLLM has it switched on (it is by default).
    """
    schedule = spec.schedule
    longest = schedule.max_len or schedule.budget + schedule.buffer
    full = -(-longest // spec.block_size)
    own = {"chunk": schedule.longest(longest), "defer": schedule.blocks_after(0), "kept": schedule.blocks(0)}[
        schedule.prompt
    ]
    size = spec.page_size_bytes * spec.layers
    before, after = format_bytes(full * size), format_bytes(own * size)
    line = (
        f"kvkeep active: {spec.label}. A request of {longest:,} tokens owns {own} blocks ({after})"
        f"{_PROMPTS[schedule.prompt]} instead of {full} ({before}); "
        f"{usable // own:,} such requests fit at once instead of {usable // full:,}."
    )
    if prefix_caching:
        line += " Prefix caching does not apply to it."
    return line
