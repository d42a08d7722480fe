"""The word-level tokenizer of the tiny reasoner: one word, one token."""

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvkeep.testbed.trace_task import FILLER, LABELS, OPERATIONS, REGISTERS

SPECIAL = ("PAD", "UNK", "BOS", "GO", "END")
WORDS = (
    *SPECIAL,
    *OPERATIONS,
    *FILLER,
    *(f"{kind}{digit}" for kind in "kcwo" for digit in range(10)),
    *(f"r{register}" for register in range(REGISTERS)),
    *(f"L{index}" for index in range(LABELS)),
)
IDS = {word: index for index, word in enumerate(WORDS)}


def encode(words: list[str]) -> list[int]:
    """Return the ids of words, without going through text."""
    return [IDS[word] for word in words]


def decode(ids: list[int]) -> list[str]:
    """Return the words of ids, up to and with the first ``END``."""
    words = [WORDS[index] for index in ids]
    return words[: words.index("END") + 1] if "END" in words else words


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer as transformers knows it; words are separated by blanks."""
    words = Tokenizer(models.WordLevel(vocab=IDS, unk_token="UNK"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        unk_token="UNK",
        pad_token="PAD",
        bos_token="BOS",
        eos_token="END",
        padding_side="left",
    )
