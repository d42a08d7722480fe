"""`kvkeep gates train` on the built-in reasoner: files, refusals, going on, and gates that are usable."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kvkeep
from kvkeep.cli import gates_resuming
from kvkeep.cli.app import app
from kvkeep.cli.gates_data import choose, documents
from kvkeep.core.files import read_tensors
from kvkeep.gates import load
from kvkeep.testbed.tokenizer import make_tokenizer
from kvkeep.training import Recipe

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
    assert "128 tokens; for longer ones" in card
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
        (("--data", "no/where"), "no such file"),
        (("--data", "."), "is a folder"),
        (("--data", "empty.txt"), "has 0 documents to learn from (0 in all)"),
        (("--data", "one.txt"), "has 1 documents to learn from (1 in all)"),
        (("--data", "useless.jsonl"), "must begin within 128 tokens"),
        (("--data", "trace(answer=0.5)"), "answer"),
        (("--data", "gsm8k"), "no training problems"),
        (("--data", "trac"), "trace"),
        (("--data", TASK, "--policy", "snapkv"), "dbtrimkv or trimkv"),
        (("--data", TASK, "--memory", "500"), "would ever fill"),
        (("--data", TASK, "--policy", "trimkv", "--tied"), "no shared projection"),
    ],
)
def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], said: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "one.txt").write_text("GO r1 r2")
    useless = [{"prompt": "GO " * 200, "completion": "r1"}, {"text": ""}]
    (tmp_path / "useless.jsonl").write_text("\n".join(map(json.dumps, useless)))
    code, output = run("--out", str(tmp_path / "gates"), *words)
    assert code != 0
    assert said in output


@pytest.mark.parametrize(
    ("place", "there", "said"),
    [
        ("gates", ["README.md"], "holds README.md but no checkpoint"),
        ("gates", ["log.jsonl", "gates.safetensors"], "holds log.jsonl and gates.safetensors but no"),
        ("gates", ["log.jsonl"], "--resume"),
        ("gates/file", ["file"], "is a file; give a folder"),
        ("gates/file/deeper", ["file"], "is a file; give a folder"),
    ],
)
def test_nothing_that_is_there_is_written_over(
    tmp_path: Path, place: str, there: list[str], said: str
) -> None:
    folder = tmp_path / "gates"
    folder.mkdir()
    for name in there:
        (folder / name).write_text("mine")
    code, output = run("--data", TASK, "--out", str(tmp_path / place))
    assert code != 0
    assert said in output
    assert all((folder / name).read_text() == "mine" for name in there)


def test_going_on_after_the_end_changes_nothing(tmp_path: Path) -> None:
    words = ("--data", TASK, "--out", str(tmp_path / "gates"))
    assert run(*words)[0] == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "gates").iterdir()}
    code, said = run(*words, "--resume")
    assert code == 0, said
    after = {path.name: path.read_bytes() for path in (tmp_path / "gates").iterdir()}
    assert after.keys() == before.keys()
    assert [name for name in after if after[name] != before[name] and name != "checkpoint.pt"] == []


def test_an_interrupt_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed(*words: object) -> None:
        raise KeyboardInterrupt

    words = ("--data", TASK, "--out", str(tmp_path / "gates"))
    with monkeypatch.context() as patch:
        patch.setattr(gates_resuming, "lines", lambda steps: pressed)
        code, said = run(*words)
    assert code == 130
    assert "step 1 of 2, before the first checkpoint" in said
    code, said = run(*words, "--resume")
    assert code == 0, said


def test_gates_that_have_not_moved_are_called_so(tmp_path: Path) -> None:
    code, said = run("--data", TASK, "--out", str(tmp_path / "open"))
    assert code == 0, said
    assert "move late" in said
    assert "not learned to forget yet: 100% of what is above the memory" in said
    moving = ("--bias", "0", "--rate", "5e-2", "--warmup", "0")
    code, said = run("--data", TASK, "--out", str(tmp_path / "moved"), *moving)
    assert code == 0, said
    assert "move late" not in said
    assert "not learned" not in said


def test_no_text_is_longer_than_the_model_reads(tmp_path: Path) -> None:
    data, recipe = tmp_path / "a.txt", Recipe(memory=8, row=64)
    data.write_text("r1 " * 500)
    for chosen in (choose(str(data)), choose(TASK)):
        learned, held_out = documents("x", chosen, make_tokenizer(), recipe, limit=60)
        for each in (learned, held_out):
            assert int(each.batch(0).packing.positions.max()) == 59


def test_a_row_of_short_texts_is_full(tmp_path: Path) -> None:
    data, recipe = tmp_path / "a.jsonl", Recipe(memory=8, row=640)
    data.write_text("\n".join(json.dumps({"text": "GO r1 r2 END"}) for _ in range(60)))
    learned, _ = documents("x", choose(str(data)), make_tokenizer(), recipe)
    assert int(learned.batch(0).packing.real.sum()) == 640


def test_runs_as_a_module() -> None:
    """What `accelerate launch -m kvkeep` needs."""
    ran = subprocess.run([sys.executable, "-m", "kvkeep", "--version"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip().endswith(kvkeep.__version__)
