"""What was measured, as numbers, JSON and a table."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from kvkeep.benchmarking.bandwidth import Bandwidth
from kvkeep.benchmarking.timing import Block, Spread
from kvkeep.core.budget import format_bytes


@dataclass(kw_only=True)
class ArmReport:
    """One arm.

    Parameters
    ----------
    name, kind
        ``kind`` is ``"stock"`` or ``"policy"``.
    steps
        Steps per round.
    step_ms
        Milliseconds per step: median and quartiles over rounds.
    round_ms
        Milliseconds per step of each round.
    tokens_per_second
        Of the whole batch, at the median.
    trimmed_tokens_per_second
        Batch over the mean step of all rounds but the quickest and the slowest (needs three rounds).
    eviction_share
        Part of the step time spent on scoring, selection and compaction, over whole periods: median
        over rounds; ``None`` for arms that never evict.
    eviction_ms
        Milliseconds of one eviction of all layers.
    evictions
        Evictions per sequence and round.
    entries_read
        Entries read per step, KV head and layer: mean over the steps.
    cache_bytes, beside_bytes
        Key and value tensors; everything recorded beside them.
    peak_bytes
        Most memory in use while this arm decoded.
    floor_ms, times_floor
        Milliseconds to read weights and entries once at the measured bandwidth; the step in floors.
    ratio_full, ratio_stock
        Speed relative to ``DynamicCache`` and to the quickest full-cache baseline.
    """

    name: str
    kind: str
    steps: int
    step_ms: Spread
    round_ms: list[float]
    tokens_per_second: float
    trimmed_tokens_per_second: float | None
    eviction_share: float | None
    eviction_ms: float | None
    evictions: float
    entries_read: float
    cache_bytes: int
    beside_bytes: int
    peak_bytes: int
    floor_ms: float
    times_floor: float
    ratio_full: Spread | None = None
    ratio_stock: Spread | None = None

    @classmethod
    def build(
        cls,
        *,
        name: str,
        kind: str,
        batch: int,
        blocks: Sequence[Block],
        eviction_seconds: Sequence[float],
        evictions: Sequence[float],
        period: int | None,
        entries_read: float,
        cache_bytes: int,
        beside_bytes: int,
        peak_bytes: int,
        floor_ms: float,
    ) -> ArmReport:
        """Derive the numbers of one arm from its blocks.

        With ``period``, an eviction belongs to so many steps. A block holds whole periods, so normally
        as many evictions as it should; the share is scaled by what it should hold over what it held,
        in case a policy's clock falls differently. Without, a share is what was measured.
        """
        round_ms = [1e3 * block.step_seconds for block in blocks]
        spread = Spread.of(round_ms)
        share = eviction_ms = None
        if sum(evictions) > 0:
            shares = [
                seconds * (block.steps / period / count if period else 1.0) / block.seconds
                for seconds, count, block in zip(eviction_seconds, evictions, blocks, strict=True)
                if count
            ]
            share = Spread.of(shares).median
            eviction_ms = Spread.of(
                [1e3 * s / n for s, n in zip(eviction_seconds, evictions, strict=True) if n]
            ).median
        inner = sorted(round_ms)[1:-1]
        return cls(
            name=name,
            kind=kind,
            steps=blocks[0].steps,
            step_ms=spread,
            round_ms=round_ms,
            tokens_per_second=1e3 * batch / spread.median,
            trimmed_tokens_per_second=1e3 * batch * len(inner) / sum(inner) if inner else None,
            eviction_share=share,
            eviction_ms=eviction_ms,
            evictions=sum(evictions) / len(evictions) if evictions else 0.0,
            entries_read=entries_read,
            cache_bytes=cache_bytes,
            beside_bytes=beside_bytes,
            peak_bytes=peak_bytes,
            floor_ms=floor_ms,
            times_floor=spread.median / floor_ms,
        )

    def compare(self, *, full: Sequence[float], stock: Sequence[float]) -> None:
        """Note the paired ratios, one per round."""
        self.ratio_full, self.ratio_stock = Spread.of(full), Spread.of(stock)


@dataclass(kw_only=True)
class DecodeReport:
    """All arms of one run of `kvkeep bench decode`."""

    machine: dict[str, Any]
    settings: Any
    arms: list[ArmReport]
    best_stock: str
    bandwidth: Bandwidth
    weight_bytes: int
    order: list[str]
    peak_source: str
    skipped: dict[str, str]
    notes: list[str]

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"kind": "decode", **asdict(self)}

    def header(self) -> list[str]:
        """Names of the columns."""
        return [
            "arm",
            "tokens/s",
            "ms/step (quartiles)",
            "× full",
            "× best stock",
            "evicting",
            "entries",
            "cache",
            "beside",
            "peak",
            "floor ms",
            "× floor",
        ]

    def rows(self) -> list[list[str]]:
        """The table, arm by arm."""
        return [
            [
                arm.name,
                f"{arm.tokens_per_second:.1f}",
                f"{arm.step_ms.median:.1f} ({arm.step_ms.low:.1f} – {arm.step_ms.high:.1f})",
                _times(arm.ratio_full),
                _times(arm.ratio_stock),
                "–" if arm.eviction_share is None else f"{100 * arm.eviction_share:.1f} %",
                f"{arm.entries_read:.0f}",
                format_bytes(arm.cache_bytes),
                format_bytes(arm.beside_bytes),
                format_bytes(arm.peak_bytes),
                f"{arm.floor_ms:.1f}",
                f"{arm.times_floor:.1f}",
            ]
            for arm in self.arms
        ]

    def tables(self) -> list[tuple[list[str], list[list[str]]]]:
        """Header and rows of two tables that fit a terminal: speed, and memory."""
        cells = self.rows()
        speed, memory = (0, 1, 2, 3, 4, 5), (0, 6, 7, 8, 9, 10, 11)
        for row, arm in zip(cells, self.arms, strict=True):
            for place, spread in ((3, arm.ratio_full), (4, arm.ratio_stock)):
                row[place] = "–" if spread is None else f"{spread.median:.2f}"
        return [
            ([self.header()[place] for place in places], [[row[place] for place in places] for row in cells])
            for places in (speed, memory)
        ]

    def title(self) -> str:
        """One line: model, machine, setting."""
        s, m = self.settings, self.machine
        speed = self.bandwidth.copy_bytes_per_second / 1e9
        return (
            f"{m['model']} ({m['dtype']}, {m['device']}, {m['threads']} threads), batch {s.batch}, "
            f"context {s.context}, {s.rounds} rounds; copy bandwidth {speed:.1f} GB/s, weights "
            f"{format_bytes(self.weight_bytes)}"
        )

    def footer(self) -> list[str]:
        """Notes, the best baseline, and what was left out."""
        lines = [f"best stock full cache: {self.best_stock}", *self.notes]
        return lines + [f"left out, {name}: {reason}" for name, reason in self.skipped.items()]

    def markdown(self) -> str:
        """The table as a file."""
        return markdown_table(self.title(), self.header(), self.rows(), self.footer(), self.machine)


def _times(spread: Spread | None) -> str:
    return "–" if spread is None else f"{spread.median:.2f} ({spread.low:.2f} – {spread.high:.2f})"


def markdown_table(
    title: str, header: list[str], rows: list[list[str]], footer: list[str], machine: dict[str, Any]
) -> str:
    """A titled table with notes and the machine it was measured on."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    table = [line(header), line(["---"] * len(header)), *(line(row) for row in rows)]
    facts = ", ".join(f"{key} {value}" for key, value in machine.items() if value is not None)
    notes = [f"- {note}" for note in [*footer, facts]]
    return "\n".join([title, "", *table, "", *notes, ""])


def describe_machine(model: PreTrainedModel) -> dict[str, Any]:
    """Where and on what was measured; no name or path of this machine."""
    device = model.device
    cuda = device.type == "cuda"
    return {
        "model": f"{model.config.model_type} {sum(p.numel() for p in model.parameters()) / 1e6:.0f}M",
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(device) if cuda else device.type,
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY"),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
