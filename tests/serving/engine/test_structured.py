"""Answers that must follow a grammar: evictions change the logits that vLLM masks, not the mask."""

from __future__ import annotations

import re
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.serving.engine.conftest import prompts
from tests.serving.engine.running import MODEL, Running, engine

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm has an environment for it")

TIGHT = {"policy": "vase-attnv", "budget": 64, "buffer": 32}
AMPLE = {**TIGHT, "budget": 900}
REGEX = r"((k[0-9]|w[0-9]|so)(L[0-9]|r[0-9])){40}"


def written(running: Running, asked: list[list[int]], new: int, **rule: Any) -> list[str]:
    """Texts without the spaces between words: the built-in model's tokens are words."""
    from vllm.sampling_params import StructuredOutputsParams

    answers = running.answer(asked, new, structured_outputs=StructuredOutputsParams(**rule))
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    return ["".join(tokenizer.convert_ids_to_tokens(answer.tokens)) for answer in answers]


def test_a_pattern_holds_however_much_is_evicted() -> None:
    """A client would get an answer that its program cannot read."""
    found = {}
    for name, setting in (("plain", None), ("ample", AMPLE), ("tight", TIGHT)):
        with engine(setting, max_num_batched_tokens=64, skip_tokenizer_init=False) as running:
            found[name] = written(running, prompts(40, 150, 201), 80, regex=REGEX)
            if name == "tight":
                free = running.answer(prompts(40), 80)  # beside nothing that is masked
                assert running.empty
    assert found["ample"] == found["plain"]
    assert found["tight"] != found["plain"]
    assert all(re.fullmatch(REGEX, text) for text in found["tight"])
    assert len(set(found["tight"])) == 3  # it reads its prompt
    assert len(free[0].tokens) == 80
