"""A tiny random model and a tokenizer of words, for tests of the harness."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = 32


def tiny_model(*, eos: int | None = 1, positions: int = 256) -> LlamaForCausalLM:
    """Two layers, two KV heads, float64: equal results whatever the shape of a batch."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).to(torch.float64).eval()


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Words w2 … w31, one token each; 0 is padding, 1 ends a text."""
    vocabulary = {"<pad>": 0, "<end>": 1} | {f"w{i}": i for i in range(2, WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", padding_side="left"
    )
