"""The built-in reasoner with entries in few bits, at equal bytes: arms, runs and their part of the page."""

import _thread
import contextlib
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click
from kvkeep_command import kvkeep as command
from page_tables import rows
from quantized_arms import FULL_BYTES, KEYS_4, Arm, entry_bytes
from smollm2_results import note

from kvkeep.core.precision import Precision
from kvkeep.evaluation.comparison import compare
from kvkeep.evaluation.records import Run, RunHeader
from kvkeep.evaluation.runlog import read_log
from kvkeep.evaluation.statistics.accuracy import accuracy
from kvkeep.evaluation.statistics.correction import corrected
from kvkeep.evaluation.statistics.problem_means import problem_means

TASK, POLICY, BUFFER = "trace(size=M)", "snapkv", 16
PLAIN = 90  # entries of the chain in full precision whose bytes all bounded arms take
BATCH = 50  # problems that are written together
#: Arms differ in entries; those that were stopped have fewer problems.
ALLOW = ("cache", "versions", "missing")
PROMPT, LONGEST = 225, 234  # tokens of a prompt of size M: mean and most
RECENT, RESERVE, FULL_RESERVE = 16, 32, 16  # the last where everything stays
HEAD = ("arm", "budget", "mean cache", "bytes per head", "problems", "score", "all right")
#: In turns, so that a run that is stopped has the most telling rules at either width.
RULES = ("none", "range", "random", "attention", "recent", "policy")


def _precision(bits: int, rule: str, key_bits: int | None = None) -> Precision:
    """The prompt keeps full precision in every bounded arm: it is read for its own sake, and in all alike."""
    if rule == "none":  # slots of full precision that a shorter prompt leaves hold the newest
        return Precision(bits=bits, key_bits=key_bits, protect="recent", sinks=LONGEST, recent=0, reserve=0)
    return Precision(bits=bits, protect=rule, sinks=LONGEST, recent=RECENT, reserve=RESERVE)  # type: ignore[arg-type]


def _bounded(bits: int, rule: str, key_bits: int | None = None) -> Arm:
    """The budget at which the chain takes, in two precisions, the bytes that 90 entries take in one."""
    precision = _precision(bits, rule, key_bits)
    few = (PROMPT + PLAIN - precision.full) * FULL_BYTES // entry_bytes(precision)
    budget = precision.full + few - PROMPT
    return Arm(name=POLICY, budget=budget, precision=precision, buffer=BUFFER, on_top=PROMPT)


def arms() -> dict[str, Arm]:
    """First those at equal bytes, then those that keep everything."""
    found = {"16 bits": Arm(name=POLICY, budget=PLAIN, buffer=BUFFER, on_top=PROMPT)}
    for group in (RULES[:3], RULES[3:]):
        for bits in (2, 4):
            found |= {f"{bits} bits, {rule}": _bounded(bits, rule) for rule in group}
    found["K4 V2, none"] = _bounded(2, "none", key_bits=4)
    found["full"] = Arm(name="full", buffer=BUFFER)
    found["full, K4 V2, none"] = Arm(name="full", buffer=BUFFER, precision=KEYS_4)
    for bits, rule in ((4, "none"), (2, "none"), *((2, rule) for rule in RULES[1:5])):
        reserve = None if rule == "none" else FULL_RESERVE
        precision = Precision(bits=bits, protect=rule, reserve=reserve)  # type: ignore[arg-type]
        found[f"full, {bits} bits, {rule}"] = Arm(name="full", buffer=BUFFER, precision=precision)
    return found


def folder(runs: Path, name: str) -> Path:
    """Where the log of an arm is."""
    return runs / "reasoner" / name.replace(", ", "-").replace(" ", "-")


def run_reasoner(runs: Path, problems: int, only: Sequence[str]) -> None:
    """One `kvkeep eval` an arm, in rounds of a batch of every arm: stopped early, all have equally many."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    for stop in range(BATCH, problems + BATCH, BATCH):
        for name, arm in arms().items():
            if (only and name not in only) or _logged(folder(runs, name)) >= min(stop, problems):
                continue
            words = ["eval", "--task", TASK, "--model", "trace-1", "--policy", arm.name, *arm.flags()]
            words += ["--out", str(folder(runs, name)), "--limit", str(problems), "--batch-size", str(BATCH)]
            words += ["--buffer", str(BUFFER), "--threads", "1", "--json", "--resume"]
            if stop < problems:
                threading.Thread(target=_stop, args=(folder(runs, name), stop), daemon=True).start()
            begin = time.monotonic()
            with contextlib.suppress(click.Abort, KeyboardInterrupt):
                command(*words)
            note(f"reasoner {name}: {_logged(folder(runs, name))} problems, {time.monotonic() - begin:.0f} s")


def _logged(out: Path) -> int:
    """Samples in a log: its lines but for header and footer."""
    log = out / "run.jsonl"
    return log.read_bytes().count(b'\n{"kind": "sample"') if log.exists() else 0


def _stop(out: Path, samples: int) -> None:
    """Stop the run as Ctrl-C does once so many samples are in its log."""
    while _logged(out) < samples:
        time.sleep(0.5)
    _thread.interrupt_main()


# -- the page -----------------------------------------------------------------------------------------------


def share(run: Run, metric: str) -> str:
    """Mean over problems in percent, with its interval."""
    found = accuracy(problem_means(run.samples, metric))
    low, high = found.interval
    return f"{100 * found.estimate:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def differences(done: dict[str, Run], pairs: Sequence[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """Challenger minus baseline in points, paired by problem; p corrected over what is asked for."""
    tests = {
        pair: compare(done[pair[1]], done[pair[0]], metric="score", allow=ALLOW).difference for pair in pairs
    }
    adjusted = corrected({pair: one.p for pair, one in tests.items()}, "holm")
    return {
        pair: f"{100 * one.estimate:+.1f} [{100 * one.interval[0]:+.1f}, {100 * one.interval[1]:+.1f}], "
        f"p {adjusted[pair]:.4f}"
        for pair, one in tests.items()
    }


def finished(runs: Path) -> dict[str, Run]:
    """The arms that have a batch or more; of a batch that was stopped, the shortest chains would be there."""
    found = {}
    for name in arms():
        whole = _logged(folder(runs, name)) // BATCH * BATCH
        if whole:
            run = read_log(folder(runs, name)).run
            found[name] = replace(run, samples=run.samples[:whole])
    return found


def headers(runs: Path) -> list[RunHeader]:
    """Headers of these arms."""
    return [run.header for run in finished(runs).values()]


def _table(done: dict[str, Run], names: Sequence[str], bases: dict[str, str]) -> list[str]:
    """``bases``: heading -> name of the arm to compare with, ``{bits}`` being the arm's own."""
    cells: dict[str, dict[tuple[str, str], str]] = {}
    other: dict[tuple[str, str], str] = {}
    for heading, base in bases.items():
        for name in names:
            precision = arms()[name].precision
            other[heading, name] = base.format(bits=0 if precision is None else precision.bits)
        pairs = [
            (name, other[heading, name])
            for name in names
            if other[heading, name] in done and other[heading, name] != name and _asked(name, heading)
        ]
        cells[heading] = differences(done, pairs) if pairs else {}
    body = []
    for name in names:
        run, arm = done[name], arms()[name]
        # A mean cache without evictions has half a period of new entries in it.
        size = (
            arm.bytes_at(arm.budget + arm.on_top)
            if arm.budget
            else arm.bytes_at(run.mean_cache - arm.buffer / 2)
        )
        line = [name, f"{arm.budget or 'all'}", f"{run.mean_cache:.0f}", f"{size:,.0f}"]
        line.append(str(len(run.samples)))
        line += [share(run, "score"), share(run, "accuracy")]
        line += [cells[heading].get((name, other[heading, name]), "–") for heading in bases]
        body.append(line)
    return rows(HEAD + tuple(bases), body)


def _asked(name: str, heading: str) -> bool:
    """What protects nothing is the baseline of rules, and no rule itself."""
    return not (name.endswith("none") and heading in ("against random", "against none"))


def reasoner_part(runs: Path) -> list[str]:
    """Scores at equal bytes, and with everything kept."""
    done = finished(runs)
    head = next(iter(done.values())).header
    bounded = [name for name in done if not name.startswith("full")]
    return [
        "## The built-in reasoner",
        "",
        f"`{TASK}`, {head.model} (weights {head.model_sha256[:12]}), dev problems, one draw "
        f"at temperature {head.sampling['temperature']}, buffer {BUFFER}; `problems` says how many had run. "
        "Scores, and problems with all parts right, in percent with the 95 % interval over problems. "
        "Differences are in points, paired by problem (bootstrap, 10,000 times), "
        "p corrected by Holm over a column.",
        "",
        f"### SnapKV at the bytes of {PLAIN} full entries of the chain",
        "",
        f"The prompt (about {PROMPT} entries) stays, in full precision, in every arm. Counted with it, every "
        "arm holds as many bytes per head in the middle of a period. Protected arms keep the newest "
        f"{RECENT} and a reserve of {RESERVE} in full precision. `none` keeps none but the prompt and some "
        f"{LONGEST - PROMPT} first tokens of the chain (`--protect recent --kv-sinks {LONGEST} --kv-recent 0 "
        f"--kv-reserve 0`): the longest prompt has {LONGEST}. A chain has about 359 tokens: with 441 nothing "
        "goes, and some of the bytes stay free: measured over whole answers, as entries of 16 bits, the arm "
        f"with 16 bits holds {done['16 bits'].mean_memory:.0f}, K4 V2 {done['K4 V2, none'].mean_memory:.0f}.",
        "",
        *_table(
            done,
            bounded,
            {
                "against random": "{bits} bits, random",
                "against none": "{bits} bits, none",
                "against 4 bits for all": "4 bits, none",
                "against 16 bits": "16 bits",
            },
        ),
        "### Everything stays, the prompt in few bits as well",
        "",
        f"No eviction. Protected arms keep 4 sinks, the newest {BUFFER} and a reserve of {FULL_RESERVE}. "
        "`bytes per head` at the mean cache. Arms that have not run are not listed.",
        "",
        *_table(
            done,
            [name for name in done if name.startswith("full")],
            {
                "against random": "full, {bits} bits, random",
                "against none": "full, {bits} bits, none",
                "against 4 bits for all": "full, 4 bits, none",
                "against 16 bits and eviction": "16 bits",
            },
        ),
    ]
