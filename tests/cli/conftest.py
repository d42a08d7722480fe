"""A tiny random model with a tokenizer in a folder, so that commands run without any download."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from kvkeep.cli.app import app
from kvkeep.testing.models import VOCABULARY, tiny_model

CHAT = "{% for m in messages %}w3 {{ m['content'] }} w4{% endfor %}"


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Llama of two layers and 512 positions; its words are w2 … w95, one token each."""
    folder = tmp_path_factory.mktemp("tiny")
    words = {"<pad>": 0, "<unk>": 1} | {f"w{i}": i for i in range(2, VOCABULARY)}
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", unk_token="<unk>", chat_template=CHAT
    )
    tokenizer.save_pretrained(folder)
    tiny_model("llama").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def run() -> Callable[..., Result]:
    """Call ``kvkeep`` with arguments, as the entry point does."""

    def call(*arguments: object, stdin: str | None = None) -> Result:
        return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)

    return call


def words(count: int, start: int = 2) -> str:
    """A prompt of so many tokens."""
    return " ".join(f"w{2 + (start + 7 * i) % (VOCABULARY - 2)}" for i in range(count))
