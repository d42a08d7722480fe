"""benchmarks/compare_kvpress.py: turns between two processes, one at a time."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
from transformers import PreTrainedModel

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

# A worker that writes down when it computes; arm "b" of side "two" fails.
FAKE = """
import json, sys, time
side, log = sys.argv[1:]
def write(data):
    print(json.dumps(data), flush=True)
write({"arms": [f"{side} a", f"{side} b"], "stack": side, "machine": {}})
for line in sys.stdin:
    arm = json.loads(line)["arm"]
    begin = time.monotonic()
    time.sleep(0.005 if arm == "one a" else 0.01)
    with open(log, "a") as file:
        file.write(f"{begin} {time.monotonic()} {arm}\\n")
    if arm == "two b":
        write({"failure": "AssertionError: window"})
    else:
        write({"seconds": 2.0 if side == "one" else 1.0, "steps": 2, "entries": 7, "cache_bytes": 1024})
"""


@pytest.fixture
def script() -> ModuleType:
    path = BENCHMARKS / "compare_kvpress.py"
    spec = importlib.util.spec_from_file_location("compare_kvpress", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_only_one_process_computes_at_a_time(script: ModuleType, tmp_path: Path) -> None:
    """Two processes that compute together slow each other down, and the comparison is void."""
    log = tmp_path / "log"
    workers = [
        script.Worker([sys.executable, "-c", FAKE, side, str(log)], threads=1) for side in ("one", "two")
    ]
    rows = script.compare(workers, rounds=2, batch=1, say=lambda text: None)
    for worker in workers:
        worker.close()
    spans = [line.split(maxsplit=2) for line in log.read_text().splitlines()]
    assert all(float(a[1]) <= float(b[0]) for a, b in pairwise(spans))
    names = [span[2] for span in spans]
    assert names[:4] == ["one a", "one b", "two a", "two b"]
    assert names[4:7] == ["two a", "one b", "one a"]
    assert [row.ms for row in rows] == [[1000.0] * 2, [1000.0] * 2, [500.0] * 2, []]
    header, cells = script.table(rows, batch=1)
    assert {len(row) for row in cells} == {len(header)}
    assert cells[2][4] == "2.00 (2.00 – 2.00)"
    assert cells[3][2:4] == ["failed", "AssertionError: window"]


def test_our_worker_serves_blocks(tiny: PreTrainedModel, tmp_path: Path) -> None:
    """The worker is the one piece that runs in another process, where errors are hard to see."""
    tiny.save_pretrained(tmp_path)
    command = [sys.executable, str(BENCHMARKS / "decode_worker.py"), "--side", "kvkeep"]
    command += ["--model", str(tmp_path), "--context", "200", "--budget", "80", "--buffer", "16"]
    command += ["--batch", "1", "--policies", "key-norm"]
    asked = '{"arm": "kvkeep key-norm"}\n{"arm": "nobody"}\n'
    done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=120, check=True)
    hello, answer, failure = done.stdout.splitlines()
    assert '"kvkeep key-norm"' in hello
    assert f'"cache_bytes": {(80 + 16) * 2 * 2 * 2 * 8 * 4}' in answer
    assert '"steps": 16' in answer
    assert failure == '{"failure": "KeyError: \'nobody\'"}'
