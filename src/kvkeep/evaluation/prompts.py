"""Prompt templates by name; those of papers word for word, because they change accuracies."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from kvkeep.core.errors import ConfigError, UnknownNameError


@dataclass(frozen=True, kw_only=True)
class PromptTemplate:
    """How a question becomes the text that the model reads.

    Parameters
    ----------
    name
        As on the command line.
    text
        What the user says; ``{question}`` is replaced.
    chat
        Wrap it in the model's chat template.
    source
        Who asked so.
    """

    name: str
    text: str
    chat: bool
    source: str

    def fill(self, question: str) -> str:
        """The text with the question in its place (braces in either are left alone)."""
        return self.text.replace("{question}", question)

    def render(self, question: str, tokenizer: Any) -> str:
        """The whole prompt.

        Raises
        ------
        ConfigError
            If the template needs a chat template and the tokenizer has none.
        """
        filled = self.fill(question)
        if not self.chat:
            return filled
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                f"prompt template {self.name!r} needs a chat template, and the model's tokenizer has none: "
                "choose a template without one (for example --prompt plain)."
            )
        messages = [{"role": "user", "content": filled}]
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def fingerprint(self, tokenizer: Any) -> str:
        """sha256 of everything that turns a question into a prompt."""
        chat = getattr(tokenizer, "chat_template", None) if self.chat else None
        text = json.dumps([asdict(self), chat], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


# What the makers of Qwen and DeepSeek-R1 recommend for mathematics.
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."

_ALL = (
    PromptTemplate(name="plain", text="{question}", chat=False, source="the question and nothing else"),
    PromptTemplate(
        name="chat",
        text="{question}",
        chat=True,
        source="the question in the chat template; VaSE, GPQA and LiveCodeBench",
    ),
    PromptTemplate(
        name="vase",
        text="{question}" + BOXED,
        chat=True,
        source="VaSE, mathematics",
    ),
    PromptTemplate(
        name="vase-gsm8k",
        text="{question} Put your final answer within \\boxed{}.",
        chat=True,
        source="VaSE, GSM8K pilot",
    ),
    PromptTemplate(
        name="rkv",
        text=(
            "You are given a math problem.\n\nProblem: {question}\n\n You need to solve the problem step "
            "by step. First, you need to provide the chain-of-thought, then provide the final answer."
            "\n\n Provide the final answer in the format: Final answer:  \\boxed{}"
        ),
        chat=False,
        source="R-KV and TriAttention, mathematics: without a chat template",
    ),
)

TEMPLATES = {template.name: template for template in _ALL}


def prompt_template(name: str) -> PromptTemplate:
    """Look a template up.

    Raises
    ------
    UnknownNameError
        If there is none of that name.

    Examples
    --------
    >>> prompt_template("vase-gsm8k").fill("What is 2+2?")
    'What is 2+2? Put your final answer within \\\\boxed{}.'
    """
    if name not in TEMPLATES:
        raise UnknownNameError("prompt template", name, TEMPLATES)
    return TEMPLATES[name]
