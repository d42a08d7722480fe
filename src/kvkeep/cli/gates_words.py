"""What `kvkeep gates train` says: the plan before, a summary after, and the card beside the gates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvkeep.training import Recipe, Trainer

CARD = "README.md"

# Above this start the slope of log beta is below 1e-5; published: a rate of 2e-4 for 10,000 steps.
_SLOW_START, _PUBLISHED = 12.0, 2.0
# Share of what is above the memory that gates may leave alive before they count as untrained.
_UNTRAINED = 0.25


def plan(trainer: Trainer, data: str, model: str) -> str:
    """What will be trained, with everything that followed from the one dial."""
    recipe, shape = trainer.recipe, trainer.student.gates.shape
    parameters = sum(weight.numel() for weight in trainer.student.gates.parameters())
    tied = "tied" if shape.tied else "untied"
    per_step = recipe.row * recipe.rows * recipe.accumulate * trainer.accelerator.num_processes
    where = "per KV head" if recipe.limit == "local" else "per KV head on average over the model"
    return (
        f"{model}: gates {shape.architecture} ({tied}{', scalar' if shape.scalar else ''}, width "
        f"{shape.width}, {parameters:,} parameters) on {len(shape.layers)} layers of {shape.kv_heads} KV "
        "heads.\n"
        f"Memory {recipe.memory:g} entries {where}; {data}; {recipe.steps} steps of {per_step:,} tokens "
        f"in rows of {recipe.row}; rate {recipe.rate:g}, {recipe.rising} steps of warm-up."
        + _slow_start(recipe)
    )


def _slow_start(recipe: Recipe) -> str:
    """A word before hours are spent: open gates move late."""
    if recipe.bias < _SLOW_START or recipe.rate * recipe.steps >= _PUBLISHED:
        return ""
    return (
        f"\nGates that start at bias {recipe.bias:g} keep everything and move late: the published recipe has "
        "10,000 steps. With --bias 6 --rate 5e-3 they move at once."
    )


def summary(facts: dict[str, Any], out: Path, policy: str) -> list[str]:
    """What came out, and how to use it."""
    from kvkeep.gates.files import FILE

    held = facts["held_out"]
    lines = [
        f"{out / FILE}: {facts['step']} steps, {facts['tokens']:,} tokens, {facts['seconds']:.0f} s.",
        f"Held out: KL to the full cache {held['kl']:.4g}, next token {held['next_token']:.4g} nats (full "
        f"cache {held['full']:.4g}), {held['alive']:.0f} entries per head alive at the end of a document.",
        f"Use them: kvkeep generate --model {facts['model']} --policy {policy} --gates {out}",
    ]
    if facts["evicting"] is not None:
        lines.insert(2, f"With evictions: {_evicting(facts['evicting'])}.")
    if facts["recipe"]["capacity"] > 0 and held["capacity"] > _UNTRAINED:
        lines.insert(
            2,
            f"They have not learned to forget yet: {min(held['capacity'], 1):.0%} of what is above the "
            "memory is still alive. Take more --steps, a larger --rate, or a start that is "
            "less open (--bias 6).",
        )
    return lines


def _evicting(found: dict[str, Any]) -> str:
    """What was measured with real evictions, in words."""
    mine, full = found["evicting"], found["full"]
    return (
        f"{mine['nats']:.4g} nats per token at a mean cache of {mine['mean_cache']:.1f} entries (full cache "
        f"{full['nats']:.4g} at {full['mean_cache']:.1f}; budget {found['budget']}, buffer "
        f"{found['buffer']}, {found['texts']} held-out texts of {found['tokens']} tokens)"
    )


def card(facts: dict[str, Any], base: str, policy: str) -> str:
    """A model card: what the gates are, from what, and what was measured."""
    held, recipe = facts["held_out"], facts["recipe"]
    alive = "entries per head alive at the end of a document"
    rows = {
        "made for": f"{facts['model']}, weights with SHA-256 `{base}` (the same after the training)",
        "data": facts["data"],
        "steps, tokens, seconds": f"{facts['step']}, {facts['tokens']:,}, {facts['seconds']:.0f}",
        "KL to the full cache, held out": f"{held['kl']:.4g} nats",
        "next-token loss, held out": f"{held['next_token']:.4g} nats (full cache {held['full']:.4g})",
        alive: f"{held['alive']:.1f} (memory {recipe['memory']:g})",
    }
    if facts["evicting"] is not None:
        rows["with real evictions"] = _evicting(facts["evicting"])
    # Measured in docs/results/smollm2-gates.md: gates that never read further let the first tokens go.
    rows["longest text trained on"] = (
        f"{recipe['row']:,} tokens; for longer ones keep the first tokens as well (`--option sinks=4`)"
    )
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return (
        f"# Retention gates for {facts['model']}\n\nFor the policy `{policy}` of kvkeep. Losses are those of "
        "the fading attention of training, in which nothing is evicted, unless a line says otherwise."
        "\n\n| | |\n|---|---|\n"
        f"{table}\n\nRecipe:\n\n```json\n{json.dumps(recipe, indent=1)}\n```\n"
    )
