"""How much may be kept, however it is written."""

from __future__ import annotations

from typing import Any

import pytest

from kvkeep import Budget
from kvkeep.core.budget import format_bytes, parse_bytes
from kvkeep.core.errors import BudgetError, ConfigError, KvkeepError


class TestBytes:
    """Sizes as people write them."""

    @pytest.mark.parametrize(
        ("text", "count"),
        [
            ("1", 1),
            (4096, 4096),
            ("512b", 512),
            ("2KiB", 2048),
            ("2 kb", 2000),
            (" 1.5 MB ", 1_500_000),
            ("22.5MiB", 23_592_960),
            ("24GiB", 24 * 2**30),
            ("1tb", 10**12),
            (".5GiB", 2**29),
        ],
    )
    def test_read(self, text: str | int, count: int) -> None:
        """A factor of 1024 read as 1000 would overrun the memory that was allowed."""
        assert parse_bytes(text) == count

    @pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "0", "2 gigs", "1e9", "2GiB extra", "inf"])
    def test_refuse(self, text: str) -> None:
        """A size that cannot be read must not become some number."""
        with pytest.raises(BudgetError) as error:
            parse_bytes(text)
        assert str(error.value) == (
            f"cannot read {text!r} as a size in bytes. Write a positive number with an optional unit, for "
            "example 800MiB, 2GiB or 1.5GB."
        )

    @pytest.mark.parametrize(
        ("count", "text"), [(512, "512 B"), (2048, "2.0 KiB"), (23_592_960, "22.5 MiB"), (2**31, "2.00 GiB")]
    )
    def test_write(self, count: int, text: str) -> None:
        """What reports show."""
        assert format_bytes(count) == text


class TestConstruction:
    """Exactly one amount, in range."""

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({}, "a budget needs an amount: entries=1024, keep_ratio=0.25 or bytes."),
            ({"entries": 0}, "budget 0 is not a whole number of at least 1 entry."),
            ({"entries": -5}, "budget -5 is not a whole number of at least 1 entry."),
            ({"entries": 2.5}, "budget 2.5 is not a whole number of at least 1 entry."),
            ({"keep_ratio": 0.0}, "keep ratio 0.0 is outside (0, 1]: 0.25 keeps a quarter of the cache."),
            ({"keep_ratio": 1.5}, "keep ratio 1.5 is outside (0, 1]: 0.25 keeps a quarter of the cache."),
            ({"keep_ratio": 0.5, "kv_bytes": 10}, "give a keep ratio or a size in bytes, not both."),
            ({"entries": True}, "budget True is not a whole number of at least 1 entry."),
            ({"entries": "64"}, "budget '64' is not a whole number of at least 1 entry."),
            ({"keep_ratio": "0.5"}, "keep ratio '0.5' is outside (0, 1]: 0.25 keeps a quarter of the cache."),
            ({"keep_ratio": True}, "keep ratio True is outside (0, 1]: 0.25 keeps a quarter of the cache."),
            (
                {"keep_ratio": float("nan")},
                "keep ratio nan is outside (0, 1]: 0.25 keeps a quarter of the cache.",
            ),
            ({"keep_ratio": 0.5, "of": 0}, "of=0 is not a whole number of at least 1 token."),
            ({"keep_ratio": 0.5, "of": "8k"}, "of='8k' is not a whole number of at least 1 token."),
            (
                {"entries": 8, "of": 16},
                "of=16 is the length of a ratio: give keep_ratio=0.25 with it.",
            ),
            *(
                (
                    {"kv_bytes": wrong},
                    f"kv_bytes {wrong!r} is not a whole number of at least 1 byte: Budget.from_bytes('2GiB') "
                    "reads sizes with units.",
                )
                for wrong in (-1, 0, "2GiB", 1.5, True)
            ),
            ({"entries": 8, "prompt": "keep"}, "prompt mode 'keep' is unknown: use 'counts' or 'kept'."),
        ],
    )
    def test_refuse(self, options: dict[str, Any], message: str) -> None:
        """Each mistake is named, and says what is allowed."""
        with pytest.raises(BudgetError) as error:
            Budget(**options)
        assert str(error.value) == message

    @pytest.mark.parametrize("amount", ["1024", 2.0, True, None])
    def test_what_is_no_amount(self, amount: Any) -> None:
        """True counts as 1 in Python; nobody means a budget of one entry by it."""
        with pytest.raises(BudgetError) as error:
            Budget.of_entries(amount)
        assert str(error.value) == (
            f"budget {amount!r} is neither a whole number of entries nor a kvkeep.Budget."
        )

    def test_accepts(self) -> None:
        """A plain count, or a budget as it is."""
        assert Budget.of_entries(7) == Budget(entries=7)
        kept = Budget(entries=7, prompt="kept")
        assert Budget.of_entries(kept) is kept

    def test_errors_belong_to_the_tree(self) -> None:
        """Callers catch the base class, or ValueError."""
        assert issubclass(BudgetError, ConfigError)
        assert issubclass(BudgetError, KvkeepError)
        assert issubclass(BudgetError, ValueError)


class TestResolve:
    """A ratio or a size becomes the count it stands for."""

    def test_ratio(self) -> None:
        """Rounded down: never more memory than asked for."""
        assert Budget.from_keep_ratio(0.25, of=8190).count == 2047
        waiting = Budget.from_keep_ratio(0.25)
        assert not waiting.resolved
        assert waiting.resolve() is waiting
        assert waiting.resolve(context=400).count == 100
        # The length it was given wins over the context.
        assert Budget(keep_ratio=0.5, of=100).resolve(context=4000).count == 50

    def test_bytes(self) -> None:
        """The size holds the budget and the buffer, so the peak stays inside it."""
        waiting = Budget.from_bytes("1MiB")
        assert waiting.resolve(rows=4) is waiting
        assert waiting.resolve(rows=4, bytes_per_entry=512).count == 512
        assert waiting.resolve(rows=4, bytes_per_entry=512, buffer=64).count == 448

    def test_what_was_asked_stays_visible(self) -> None:
        """Reports print both forms."""
        assert str(Budget.from_keep_ratio(0.25, of=8192)) == "2048 entries = ratio 0.25 of 8192 tokens"
        sized = Budget.from_bytes("1MiB").resolve(rows=1, bytes_per_entry=1024)
        assert str(sized) == "1024 entries = 1.0 MiB"
        assert str(Budget(entries=512, prompt="kept")) == "512 entries + prompt"
        assert str(Budget.from_keep_ratio(0.5)) == "ratio 0.5"

    def test_prompt_mode_survives(self) -> None:
        """A kept prompt must not be lost on the way to a count."""
        assert Budget.from_keep_ratio(0.5, prompt="kept").resolve(context=10).prompt == "kept"
        assert Budget.from_bytes("1MiB", prompt="kept").resolve(rows=1, bytes_per_entry=8).prompt == "kept"

    def test_too_small(self) -> None:
        """A negative count tells nobody what to give instead: the least size does."""
        with pytest.raises(BudgetError) as caught:
            Budget.from_bytes(10).resolve(rows=2, bytes_per_entry=1024, buffer=64, least=65)
        assert str(caught.value) == (
            "the budget '10 B' is too small: one entry takes 2048 bytes in all layers and heads of 2 "
            "sequences, and a budget of 65 with a buffer of 64 is the least that works: give at least 264192 "
            "bytes (258.0 KiB), or lower the buffer."
        )
        enough = Budget.from_bytes(264192).resolve(rows=2, bytes_per_entry=1024, buffer=64, least=65)
        assert enough.count == 65
        with pytest.raises(BudgetError, match="too small"):
            Budget.from_bytes(264191).resolve(rows=2, bytes_per_entry=1024, buffer=64, least=65)
        with pytest.raises(BudgetError, match=r"comes to 0 entries per head of 50 tokens: give .* 0.02\."):
            Budget.from_keep_ratio(0.01, of=50)

    def test_reading_an_unresolved_count(self) -> None:
        """The message says what is missing for either form."""
        with pytest.raises(BudgetError) as error:
            _ = Budget.from_keep_ratio(0.25).count
        assert "the budget 'ratio 0.25' is not a count yet" in str(error.value)
        assert "context=8192 on the cache" in str(error.value)
        assert "rows=8 on the cache" in str(error.value)
