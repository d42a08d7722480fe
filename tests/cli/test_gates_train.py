"""`kvkeep gates train` on the built-in reasoner: files, refusals, going on, and gates that are usable."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kvkeep
from kvkeep.cli.app import app
from kvkeep.core.files import read_tensors
from kvkeep.gates import load

SMALL = (
    "--memory",
    "16",
    "--row",
    "128",
    "--accumulate",
    "1",
    "--steps",
    "2",
    "--width",
    "8",
    "--threads",
    "1",
)
TASK = "trace(registers=5, hot=2, dormant=1, steps=4)"


def run(*words: str) -> tuple[int, str]:
    """Exit status, and everything that was printed."""
    result = CliRunner().invoke(app, ["gates", "train", "--model", "trace-1", *SMALL, *words])
    return result.exit_code, result.output + (repr(result.exception) if result.exception else "")


def test_trains_on_a_task_and_writes_gates_and_card(tmp_path: Path) -> None:
    code, said = run("--data", TASK, "--out", str(tmp_path))
    assert code == 0, said
    assert "kvkeep generate --model trace-1 --policy dbtrimkv" in said
    gates = load(tmp_path / "gates.safetensors")
    assert load(tmp_path).sha256 == gates.sha256  # the folder is what the last line names
    assert (gates.shape.architecture, gates.shape.tied, gates.shape.width) == ("rg10", True, 8)
    card = (tmp_path / "README.md").read_text()
    assert gates.base is not None
    assert gates.base in card
    assert '"memory": 16' in card
    assert "with real evictions" in card
    found = read_tensors(tmp_path / "gates.safetensors", "gates")[1]["training"]["evicting"]
    assert (found["budget"], found["buffer"]) == (16, 4)
    assert 10 < found["evicting"]["mean_cache"] < 20 < found["full"]["mean_cache"]
    assert found["full"]["mean_cache"] == found["tokens"] / 2
    assert [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text().splitlines()] == [1, 2]
    code, said = run("--data", TASK, "--out", str(tmp_path))
    assert code != 0
    assert "--resume" in said


def test_trains_on_a_file_for_trimkv(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": "GO r1 r2", "completion": "r3 " * 60 + "END"}) for _ in range(30)]
    data = tmp_path / "a.jsonl"
    data.write_text("\n".join(lines))
    code, said = run("--data", str(data), "--policy", "trimkv", "--out", str(tmp_path / "gates"), "--json")
    assert code == 0, said
    facts = json.loads(said[said.index("{") :])
    assert facts["recipe"]["scope"] == "local"
    assert facts["data"].startswith("a.jsonl (SHA-256 ")
    assert facts["held_out"]["alive"] > 1


def test_texts_that_fit_the_memory_are_not_measured_with_evictions(tmp_path: Path) -> None:
    """A card that called a full cache an evicting one would praise the gates for nothing."""
    data = tmp_path / "a.jsonl"
    data.write_text("\n".join(json.dumps({"text": "r1 r2 r3 r1 r2"}) for _ in range(30)))
    code, said = run("--data", str(data), "--out", str(tmp_path / "gates"), "--json")
    assert code == 0, said
    assert json.loads(said[said.index("{") :])["evicting"] is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--data", "nowhere.txt"), "no such file"),
        (("--data", "gsm8k"), "no training problems"),
        (("--data", "trac"), "trace"),
        (("--data", TASK, "--policy", "snapkv"), "dbtrimkv or trimkv"),
        (("--data", TASK, "--memory", "500"), "would ever fill"),
        (("--data", TASK, "--policy", "trimkv", "--tied"), "no shared projection"),
    ],
)
def test_refusals(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    code, output = run("--out", str(tmp_path / "gates"), *words)
    assert code != 0
    assert said in output


def test_runs_as_a_module() -> None:
    """What `accelerate launch -m kvkeep` needs."""
    ran = subprocess.run([sys.executable, "-m", "kvkeep", "--version"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip().endswith(kvkeep.__version__)
