"""Flags that several commands share, and the policy that they describe."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvkeep.core.budget import Budget
from kvkeep.core.budget import PromptMode as _PromptMode
from kvkeep.core.errors import BudgetError, ConfigError

if TYPE_CHECKING:
    from kvkeep.core.policy import Policy
    from kvkeep.core.precision import Precision

Model = Annotated[
    str,
    typer.Option(
        "--model",
        help="Folder or hub id of a causal language model; 'demo' is SmolLM2-135M, 'trace-1' and 'trace-2' "
        "are the built-in reasoners.",
    ),
]
PolicyText = Annotated[
    str,
    typer.Option(
        "--policy", help="A name of `kvkeep policies`, or a composition: 'triattention + sample + reserve'."
    ),
]
Entries = Annotated[
    int | None, typer.Option("--budget", help="Entries kept per KV head and layer after an eviction.")
]
TokenBudget = Annotated[
    int | None,
    typer.Option(
        help="Entries that a head reads in a step, for policies that keep everything: quest, seer-attention."
    ),
]
KeepRatio = Annotated[
    float | None, typer.Option(help="Budget as a fraction of prompt and new tokens, for example 0.25.")
]
KvBytes = Annotated[
    str | None, typer.Option(help="Budget as bytes for keys and values of all sequences, for example 2GiB.")
]
PromptMode = Annotated[
    str, typer.Option(help="counts: prompt entries count towards the budget. kept: they stay on top of it.")
]
Buffer = Annotated[
    int | None,
    typer.Option(help="Newest entries always kept, and the distance of evictions [the policy's own]."),
]
PolicyOptions = Annotated[
    list[str] | None,
    typer.Option("--option", help="key=value: any other setting of the policy. Repeatable."),
]
Prefill = Annotated[
    str | None,
    typer.Option(
        help="When to evict while reading the prompt: defer, after, or chunk [the policy's own; chunk "
        "with --prefill-chunk]."
    ),
]
PrefillChunk = Annotated[
    int | None, typer.Option(help="Read the prompt so many tokens at a time: memory stays bounded.")
]
Calibration = Annotated[
    Path | None, typer.Option(help="Statistics of this model, written by `kvkeep calibrate`.")
]
Store = Annotated[
    str,
    typer.Option(
        help="dense: one block per layer. paged: pages of a shared pool, a different length per head. auto: "
        "paged where the policy needs it."
    ),
]
KvBits = Annotated[
    int | None,
    typer.Option(
        help="Store entries in 8, 4 or 2 bits, but for those that --protect names [full precision for all]."
    ),
]
KvKeyBits = Annotated[
    int | None,
    typer.Option(help="Bits of keys, which need more of them than values, with --kv-bits [as many]."),
]
ProtectRule = Annotated[
    str | None,
    typer.Option(
        "--protect",
        help="Which entries keep full precision beside --kv-bits: range (largest value ranges), recent, "
        "attention, policy (its highest ranks), random, none [range].",
    ),
]
KvGroup = Annotated[int | None, typer.Option(help="Channels that share a scale, with --kv-bits [32].")]
KvReserve = Annotated[
    int | None,
    typer.Option(
        help="Entries per head that --protect chooses, beside sinks and newest [a quarter of the budget; 64]."
    ),
]
KvPrompt = Annotated[
    str | None,
    typer.Option(
        help="full: the prompt stays in full precision, on top of --kv-reserve, where --prompt-mode is kept. "
        "few: its entries are like any others [few]."
    ),
]
KvSinks = Annotated[
    int | None, typer.Option(help="First tokens that keep full precision, with --kv-bits [4].")
]
KvRecent = Annotated[
    int | None, typer.Option(help="Newest tokens that keep full precision, with --kv-bits [the buffer].")
]
Gates = Annotated[
    Path | None,
    typer.Option(
        help="Gates of this model: retention gates for trimkv and dbtrimkv (kvkeep's file, or a published "
        "folder), block gates for seer-attention ('trace-1-blocks' comes with kvkeep)."
    ),
]
Seed = Annotated[int, typer.Option(help="Of stochastic policies and of sampling.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads [torch's own choice].")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
Attention = Annotated[str, typer.Option(help="sdpa, eager, flash_attention_2 or flash_attention_3.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 …")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]

# Settings that have a flag: as an --option they would be a second, contradicting way to say the same.
_FLAGS = {
    "budget": "--budget (or --keep-ratio, --kv-bytes)",
    "buffer": "--buffer",
    "prefill": "--prefill",
    "token_budget": "--token-budget",
}


def make_budget(
    entries: int | None, keep_ratio: float | None, kv_bytes: str | None, prompt_mode: str
) -> Budget | None:
    """The budget that the flags describe; ``None`` if there is no such flag.

    Raises
    ------
    BudgetError
        If more than one amount is given, or an amount cannot be right.
    """
    given = [
        flag
        for flag, value in (("--budget", entries), ("--keep-ratio", keep_ratio), ("--kv-bytes", kv_bytes))
        if value is not None
    ]
    if len(given) > 1:
        raise BudgetError(f"{' and '.join(given)} say the same thing in different ways: give one of them.")
    if prompt_mode not in ("counts", "kept"):
        raise BudgetError(f"prompt mode {prompt_mode!r} is unknown: use counts or kept.")
    prompt: _PromptMode = "kept" if prompt_mode == "kept" else "counts"
    if entries is not None:
        return Budget(entries=entries, prompt=prompt)
    if keep_ratio is not None:
        return Budget.from_keep_ratio(keep_ratio, prompt=prompt)
    return None if kv_bytes is None else Budget.from_bytes(kv_bytes, prompt=prompt)


def make_policy(
    text: str,
    budget: Budget | None,
    *,
    buffer: int | None = None,
    prefill: str | None = None,
    prefill_chunk: int | None = None,
    options: list[str] | None = None,
    token_budget: int | None = None,
) -> Policy:
    """The policy that the flags describe.

    Raises
    ------
    ConfigError
        If a name is unknown, a value out of range, or the budget missing.
    """
    from kvkeep.policies.compose import policy
    from kvkeep.policies.text import read_value

    given: dict[str, Any] = {}
    for setting in options or []:
        key, equals, value = setting.partition("=")
        if not (equals and key.strip() and value.strip()):
            raise ConfigError(f"cannot read --option {setting!r}: write key=value, for example reserve=128.")
        name = key.strip().replace("-", "_")
        if name in _FLAGS:
            raise ConfigError(f"--option {setting} has a flag of its own: use {_FLAGS[name]}.")
        if name in given:
            raise ConfigError(f"--option {name} is given twice: give it once.")
        given[name] = read_value(value.strip())
    if prefill_chunk is not None:
        if prefill_chunk < 1:
            raise ConfigError(f"--prefill-chunk {prefill_chunk} is below 1 token.")
        prefill = prefill or "chunk"
    _refuse_token_budget(text, token_budget)
    flags = {"budget": budget, "buffer": buffer, "prefill": prefill, "token_budget": token_budget}
    return policy(text, **given | {key: value for key, value in flags.items() if value is not None})


def _refuse_token_budget(text: str, given: int | None) -> None:
    from kvkeep.core.registry import available_policies
    from kvkeep.policies.text import read_parts

    name = read_parts(text)[0][0]
    kind = available_policies().get(name)
    if given is not None and kind is not None and not hasattr(kind, "token_budget"):
        raise ConfigError(
            f"--token-budget says what policies read that keep everything, and {name} is none of them: leave "
            "it out, or use --policy quest."
        )


def refuse_unused(policy: Policy, budget: Budget | None) -> None:
    """Refuse a budget for a policy that reads a part of everything: it would be taken for what is read.

    Raises
    ------
    ConfigError
        Naming the flag that is meant.
    """
    if policy.traits.reads is not None and budget is not None:
        raise ConfigError(
            f"{policy.name} keeps every entry, so a budget means nothing to it: --token-budget says how many "
            "entries a head reads in a step."
        )


def make_precision(
    bits: int | None,
    protect: str | None,
    group: int | None,
    reserve: int | None,
    sinks: int | None,
    recent: int | None,
    prompt: str | None = None,
    key_bits: int | None = None,
) -> Precision | None:
    """What the flags say of few bits; ``None`` if all entries stay in full precision.

    Raises
    ------
    ConfigError
        If a number cannot be right, or a flag needs ``--kv-bits``.
    """
    from kvkeep.core.precision import Precision, flag

    given: dict[str, Any] = {"protect": protect, "group": group, "reserve": reserve}
    given |= {"sinks": sinks, "recent": recent, "prompt": prompt, "key_bits": key_bits}
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if bits is None:
        for name in chosen:
            raise ConfigError(
                f"{flag(name)} says how entries in few bits are stored: add --kv-bits 4 (or 8, 2)."
            )
        return None
    if protect == "none" and sinks:
        raise ConfigError(
            f"--kv-sinks {sinks} would mean nothing beside --protect none, which spares no entry: leave it "
            "out, or use --protect recent --kv-recent 0 --kv-reserve 0 to spare the first tokens alone."
        )
    return Precision(bits=bits, **chosen)


def require_calibration(policy: Policy, given: Path | None) -> None:
    """Refuse a policy that needs statistics without a file of them, and a file that nobody would read.

    Raises
    ------
    ConfigError
        Saying how to make the file, or to leave it out.
    """
    if given is not None and not policy.traits.calibration:
        raise ConfigError(f"{policy.name} reads no statistics: leave --calibration out.")
    if policy.traits.calibration and given is None:
        raise ConfigError(
            f"{policy.name} needs statistics of this model: measure them once with `kvkeep calibrate --text "
            "some.txt --out FILE`, then add --calibration FILE."
        )


def require_gates(policy: Policy, given: Path | None) -> None:
    """Refuse a policy that needs gates without a file of them, and a file that nobody would read.

    Raises
    ------
    ConfigError
        Saying which flag names the file, or to leave it out.
    """
    reads = policy.traits.reads
    if given is not None and not policy.traits.log_retention and not (reads is not None and reads.gates):
        raise ConfigError(f"{policy.name} reads no gates: leave --gates out.")
    if reads is not None and reads.gates and given is None:
        raise ConfigError(
            f"{policy.name} needs block gates that were trained for this model: add --gates FILE "
            "(`kvkeep gates train-blocks` makes them)."
        )
    if policy.traits.log_retention and given is None:
        raise ConfigError(
            f"{policy.name} needs retention gates that were trained for this model: add --gates FILE "
            "(`kvkeep gates train` makes them)."
        )
