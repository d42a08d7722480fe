"""Every mistake of a user: one sentence that helps, an exit code, no traceback, nothing half-written."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers
from torch import Tensor
from typer.testing import Result

import kvkeep
from kvkeep import calibration
from kvkeep.cli.boundary import guard, one_sentence
from kvkeep.core import registry
from kvkeep.core.errors import (
    BudgetError,
    ConfigError,
    DataFileError,
    EvidenceError,
    MissingExtraError,
    UnknownNameError,
    UnsupportedError,
)
from kvkeep.core.view import LayerView
from kvkeep.policies.ranked import RankedPolicy
from kvkeep.testing.models import tiny_model, tokens
from tests.cli.conftest import words

Run = Callable[..., Result]


def refusal(result: Result, code: int) -> str:
    """The one line on stderr of a command that failed with this code."""
    assert result.exit_code == code, (result.exit_code, result.stdout, result.stderr)
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("kvkeep: ")
    assert "Traceback" not in result.stderr
    return lines[0].removeprefix("kvkeep: ")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--policy", "vase-atnv", "--budget", 24), "did you mean 'vase-attnv'?"),
        (("--policy", "snapkv + smaple", "--budget", 99), "did you mean 'sample'?"),
        (("--budget", 99, "--option", "reserv=4"), "did you mean 'reserve'?"),
        (("--budget", 99, "--option", "reserve"), "write key=value"),
        (("--budget", 99, "--option", "budget=64"), "--option budget=64 has a flag of its own: use --budget"),
        (("--option", "budget=64"), "use --budget (or --keep-ratio, --kv-bytes)"),
        (("--budget", 99, "--buffer", 8, "--option", "buffer=4"), "use --buffer"),
        (("--budget", 99, "--option", "prefill=after"), "use --prefill"),
        (("--budget", 99, "--option", "sinks=4", "--option", "sinks=8"), "sinks is given twice"),
        (("--budget", 8, "--buffer", 8), "leaves nothing of a budget of 8"),
        (("--budget", 10, "--buffer", 8, "--option", "sinks=4"), "more than the budget of 10"),
        (("--budget", 0), "not a whole number of at least 1"),
        (("--budget", 99, "--keep-ratio", 0.5), "give one of them"),
        (("--keep-ratio", 1.5), "outside (0, 1]"),
        (("--kv-bytes", "lots"), "for example 800MiB"),
        (("--budget", 99, "--prompt-mode", "keep"), "use counts or kept"),
        ((), "budget=1024"),
        (("--budget", 99, "--prefill", "before"), "use one of defer, after, chunk"),
        (("--budget", 99, "--prefill-chunk", 0), "below 1 token"),
        (("--budget", 99, "--max-new-tokens", 0), "out of range: at least 1"),
        (("--budget", 99, "--repetition-rise", 1), "add --temperature"),
        (("--budget", 99, "--temperature", -1), "0 (no sampling) or more"),
        (("--budget", 99, "--top-p", 2), "above 0, at most 1"),
        (("--budget", 99, "--dtype", "float23"), "did you mean 'float32'?"),
        (("--budget", 99, "--attention", "sdap"), "did you mean 'sdpa'?"),
        *(
            ((*flags, "--budget", 200, "--policy", policy), "--out FILE`, then add --calibration FILE")
            for policy in ("triattention", "set-diversity + sample")
            for flags in ((), ("--model", "./nowhere"))  # said before the model is looked for
        ),
        (("--budget", 99, "--threads", 0), "at least 1"),
        (("--budget", 99, "--token-budget", 64), "vase-attnv is none of them"),
        (("--budget", 99, "--device", "gpu"), "use auto, cpu, cuda"),
        (("--bugdet", 99), "--budget"),
        (("--budget", "many"), "Invalid value for '--budget'"),
    ],
)
def test_a_wrong_setting_is_explained(run: Run, tiny_folder: Path, flags: Any, sentence: str) -> None:
    """A typo must cost a second, not a run with other settings than the user believes in."""
    result = run("generate", words(9), "--model", tiny_folder, *flags)
    assert sentence in refusal(result, 2)
    assert result.stdout == ""


def test_a_size_that_is_too_small_says_which_would_do(run: Run, tiny_folder: Path) -> None:
    """What one entry takes depends on the model: a user cannot know it. What is said must work."""
    arguments = ("generate", words(9), "--model", tiny_folder, "--buffer", 8, "--max-new-tokens", 4)
    sentence = refusal(run(*arguments, "--kv-bytes", 10), 2)
    assert "one entry takes 512 bytes in all layers and heads of 1 sequence" in sentence
    found = re.search(r"give at least (\d+) bytes", sentence)
    assert found is not None
    least = int(found.group(1))
    assert run(*arguments, "--kv-bytes", least).exit_code == 0
    assert f"give at least {least} bytes" in refusal(run(*arguments, "--kv-bytes", least - 1), 2)


@pytest.mark.parametrize("prompt", ["", "  \n"])
def test_an_empty_prompt_is_refused(run: Run, tiny_folder: Path, prompt: str) -> None:
    """A script whose variable is empty should hear of it, not get a text about nothing."""
    arguments = ("generate", "--model", tiny_folder, "--budget", 99)
    assert "the prompt is empty" in refusal(run(*arguments, prompt), 2)
    assert "the prompt is empty" in refusal(run(*arguments, stdin=prompt), 2)


def test_a_prompt_that_becomes_no_token_is_refused(run: Run, tiny_folder: Path, tmp_path: Path) -> None:
    """A tokenizer may drop what a person can see; transformers fails on zero tokens."""
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    file = folder / "tokenizer.json"
    data = json.loads(file.read_text())
    data["normalizer"] = {"type": "Replace", "pattern": {"String": "…"}, "content": ""}
    file.write_text(json.dumps(data))
    result = run("generate", "…", "--no-chat", "--model", folder, "--budget", 99)
    assert "the prompt is empty" in refusal(result, 2)


def test_a_prompt_beyond_the_positions_is_refused(run: Run, tiny_folder: Path) -> None:
    """Past its positions a model answers with noise that looks like an answer."""
    result = run("generate", words(600), "--model", tiny_folder, "--budget", 99)
    assert "602 tokens, but the model has 512 positions" in refusal(result, 2)


def test_two_prompts_are_one_too_many(run: Run, tiny_folder: Path, tmp_path: Path) -> None:
    """Taking one of them silently would answer the other question."""
    file = tmp_path / "prompt.txt"
    file.write_text("w5")
    result = run("generate", "w4", "--prompt-file", file, "--model", tiny_folder, "--budget", 99)
    assert "give one prompt" in refusal(result, 2)


@pytest.mark.parametrize(
    ("name", "content", "code", "sentence"),
    [
        ("prompts.txt", b"\n \n", 2, "holds no prompt"),
        ("prompts.txt", b"\xff\xfe", 1, "not UTF-8"),
        (
            "prompts.jsonl",
            b'{"prompt": "w2"}\n{"text": "w3"}',
            1,
            'line 2 is not a JSON object with a "prompt"',
        ),
        ("prompts.jsonl", b'{"prompt": "w2"', 1, "line 1"),
        ("prompts.jsonl", b'{"prompt": " "}', 2, "line 1 holds an empty prompt"),
        ("missing.txt", None, 1, "No such file"),
    ],
)
def test_a_bad_batch_file_is_named_with_its_line(
    run: Run, tiny_folder: Path, tmp_path: Path, name: str, content: bytes | None, code: int, sentence: str
) -> None:
    """In a file of thousands the place is what one needs to know."""
    if content is not None:
        (tmp_path / name).write_bytes(content)
    result = run("generate", "--batch-file", tmp_path / name, "--model", tiny_folder, "--budget", 99)
    assert sentence in refusal(result, code)


def test_a_chat_without_a_template_is_refused(run: Run, tiny_folder: Path, tmp_path: Path) -> None:
    """--chat on a base model cannot be honoured."""
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    result = run("generate", words(9), "--chat", "--model", folder, "--budget", 99)
    assert "no chat template: use --no-chat" in refusal(result, 2)


def _cut(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


DAMAGE: dict[str, Callable[[Path], object]] = {
    "weights cut": lambda folder: _cut(folder / "model.safetensors", 5000),
    "weights empty": lambda folder: _cut(folder / "model.safetensors", 0),
    "weights gone": lambda folder: (folder / "model.safetensors").unlink(),
    "config cut": lambda folder: _cut(folder / "config.json", 60),
    "config gone": lambda folder: (folder / "config.json").unlink(),
    "tokenizer cut": lambda folder: _cut(folder / "tokenizer.json", 200),
    "another shape": lambda folder: (folder / "config.json").write_text(
        (folder / "config.json").read_text().replace('"hidden_size": 64', '"hidden_size": 32')
    ),
    "more layers": lambda folder: (folder / "config.json").write_text(
        (folder / "config.json").read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 3')
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_model_is_refused(run: Run, tiny_folder: Path, tmp_path: Path, damage: str) -> None:
    """A download that stopped half-way must not end in a stack of foreign frames, or in random weights."""
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    DAMAGE[damage](folder)
    result = run("generate", words(9), "--model", folder, "--budget", 99)
    assert str(folder) in refusal(result, 1)


def test_a_model_that_is_nowhere_is_refused(run: Run) -> None:
    """A typo in the path is the commonest mistake of all."""
    for command in (("generate", words(9), "--budget", 99), ("plan",)):
        for place in ("./no/such/model", "/nonexistent", "some/deeper/folder"):
            sentence = refusal(run(*command, "--model", place), 1)
            assert sentence == (f"there is no folder {place}: give a folder that holds a model, or a hub id.")
    assert "Give a folder that holds a model, or an id of a hub" in refusal(
        run("plan", "--model", "nobody/nothing"), 1
    )


def test_a_file_in_the_place_of_a_model_is_refused(run: Run, tmp_path: Path) -> None:
    """GGUF users pass the file."""
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    sentence = refusal(run("plan", "--model", tmp_path / "model.gguf"), 1)
    assert "is a file: give the folder of a model" in sentence


@pytest.mark.parametrize(
    ("attention", "package"), [("flash_attention_2", "flash-attn"), ("flash_attention_3", "flash-attn-3")]
)
def test_missing_flash_attention_is_not_blamed_on_the_model(
    run: Run, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, attention: str, package: str
) -> None:
    """A user would download the model again, for nothing."""
    name = f"is_flash_attn_{attention[-1]}_available"
    arguments = ("generate", words(9), "--model", tiny_folder, "--budget", 99, "--attention", attention)
    monkeypatch.setattr(transformers.utils, name, lambda: False)
    sentence = refusal(run(*arguments), 2)
    assert f"needs the package {package} and a GPU" in sentence
    assert "use --attention sdpa or eager" in sentence
    assert "damaged" not in sentence
    monkeypatch.setattr(transformers.utils, name, lambda: True)
    assert "add --dtype bfloat16 or float16" in refusal(run(*arguments), 2)


def test_a_model_of_another_kind_is_refused(run: Run, tmp_path: Path) -> None:
    """An encoder-decoder has a second cache that kvkeep does not manage."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    assert "t5" in refusal(run("generate", words(9), "--model", tmp_path, "--budget", 99), 2)
    assert "t5" in refusal(run("plan", "--model", tmp_path), 2)


@pytest.fixture(scope="module")
def statistics_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Calibration statistics of a model of another shape than the tiny llama's."""
    path = tmp_path_factory.mktemp("calibration") / "qwen3.safetensors"
    model = tiny_model("llama-yarn")
    calibration.capture(model, tokens(1, 64)).save(path)
    return path


def test_calibration_of_another_model_is_refused(run: Run, tiny_folder: Path, statistics_file: Path) -> None:
    """Its directions mean nothing here: the policy would keep arbitrary entries."""
    arguments = ("generate", words(9), "--model", tiny_folder, "--policy", "triattention", "--budget", 200)
    result = run(*arguments, "--calibration", statistics_file)
    assert "does not fit" in refusal(result, 1)


@pytest.mark.parametrize("size", [0, 40, 900])
def test_a_truncated_calibration_file_is_refused(
    run: Run, tiny_folder: Path, statistics_file: Path, tmp_path: Path, size: int
) -> None:
    """Half a file must not give half of the heads their statistics."""
    path = tmp_path / "cut.safetensors"
    path.write_bytes(statistics_file.read_bytes()[:size])
    arguments = ("generate", words(9), "--model", tiny_folder, "--policy", "triattention", "--budget", 200)
    assert str(path) in refusal(run(*arguments, "--calibration", path), 1)


@dataclass(frozen=True, kw_only=True)
class Broken(RankedPolicy):
    """Score with NaN."""

    name: ClassVar[str] = "broken"

    def score(self, view: LayerView) -> Tensor:
        return torch.full(view.shape, float("nan"))


def test_nan_in_a_score_stops_the_run(run: Run, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN cannot be ranked: whatever was kept would be an accident."""
    monkeypatch.setitem(registry._added, "broken", Broken)
    flags = ("--policy", "broken", "--budget", 16, "--buffer", 8)
    result = run("generate", words(40), "--model", tiny_folder, *flags)
    assert result.exit_code == 1
    assert "NaN" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_policy_object_of_the_wrong_kind_is_explained() -> None:
    """In Python the name is the first thing people pass."""
    with pytest.raises(ConfigError, match="is not a policy object"):
        kvkeep.RetentionCache(tiny_model(), "vase-attnv")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("polices",), "policies"),
        (("policies", "show", "vase-atnv"), "did you mean 'vase-attnv'?"),
        (("policies", "show"), "Missing argument 'name'"),
        (("plan", "--memory", "big"), "cannot read 'big' as a size"),
        (("plan", "--budgets", "512,x"), "cannot read 'x' in --budgets '512,x': write counts"),
        (("plan", "--budgets", "0,abc"), "cannot read '0' in --budgets '0,abc': write counts of at least 1"),
        (("plan", "--budgets", ""), "cannot read '' in --budgets '': write counts"),
        (("plan", "--budgets", "-5"), "cannot read '-5'"),
        (("plan", "--context", 0), "below 1 token"),
        (("plan", "--dtype", "int3"), "unknown dtype 'int3'"),
        (("demo", "--policies", "full; triattention"), "triattention needs statistics of the model"),
        (("demo", "--policies", ";"), "no policy was named"),
        (("demo", "--policies", "full; vase"), "unknown policy 'vase'"),
        (("demo", "--keep-ratio", 0), "outside (0, 1]"),
    ],
)
def test_other_commands_explain_as_well(run: Run, arguments: tuple[Any, ...], sentence: str) -> None:
    """The same boundary stands around every command."""
    assert sentence in refusal(run(*arguments), 2)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            ("--policy", "quest", "--token-budget", 64, "--kv-bits", 4),
            "reads blocks of entries where they lie",
        ),
        (("--kv-bytes", "1MiB", "--kv-bits", 4), "a budget in bytes does not say how many entries"),
        (("--budget", 99, "--kv-bits", 4, "--kv-group", 24), "16 channels"),
        (("--policy", "snapkv + pyramid", "--budget", 99, "--store", "dense"), "paged"),
    ],
)
def test_flags_that_do_not_fit_each_other(
    run: Run, tiny_folder: Path, flags: tuple[Any, ...], sentence: str
) -> None:
    """Told like every other mistake of a user, although a model had to be loaded to find it."""
    result = run("generate", words(9), "--model", tiny_folder, *flags)
    assert sentence in refusal(result, 2)


def _fails(error: BaseException) -> Callable[[], None]:
    def run() -> None:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (FileNotFoundError(2, "No such file or directory", "x.txt"), 1, "x.txt: No such file or directory."),
        (PermissionError("no entry"), 1, "no entry."),
        (KeyboardInterrupt(), 130, "stopped."),
        (ConfigError("wrong in itself"), 2, "wrong in itself"),
        (BudgetError("too small"), 2, "too small"),
        (UnknownNameError("policy", "x", ["snapkv"]), 2, "unknown policy 'x'"),
        (UnsupportedError("this with that", ["because"]), 2, "this with that: because."),
        (EvidenceError("these runs", ["other problems"]), 1, "these runs: other problems."),
        (DataFileError("damaged"), 1, "damaged"),
        (MissingExtraError("vllm", "vllm", "serving"), 1, "serving needs the package 'vllm'"),
        (ValueError("odd\nmore"), 1, "unexpected ValueError: odd This is probably a defect"),
    ],
)
def test_whatever_else_happens_is_one_line(
    capsys: pytest.CaptureFixture[str], error: BaseException, code: int, sentence: str
) -> None:
    """A traceback tells a user nothing, and a defect must still be told apart from a mistake of theirs."""
    assert guard(_fails(error)) == code
    captured = capsys.readouterr().err
    assert captured.startswith(f"kvkeep: {sentence}")
    assert captured.count("\n") == 1


def test_a_defect_shows_its_traceback_on_request(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise nobody could report it."""
    monkeypatch.setenv("KVKEEP_DEBUG", "1")
    guard(_fails(ValueError("odd")))
    assert "Traceback" in capsys.readouterr().err


def test_several_reasons_become_one_sentence() -> None:
    """Scripts read stderr by the line."""
    assert one_sentence(str(UnsupportedError("no", ["first", "second"]))) == "no: first; second."


def test_the_installed_command_behaves_the_same() -> None:
    """The entry point, not only the app object, has the boundary."""
    code = "import sys; from kvkeep.cli import main; sys.argv = ['kvkeep', 'polices']; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "kvkeep: No such command 'polices'. Did you mean 'policies'? (see kvkeep --help)\n"


def test_a_closed_pipe_is_no_error() -> None:
    """`kvkeep policies | head -1` must not complain about the reader that left."""
    code = "import sys; from kvkeep.cli import main; sys.argv = ['kvkeep', 'policies', '--json']; main()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
