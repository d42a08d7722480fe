"""The split that nobody can draw again."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from kvkeep.core.errors import ConfigError
from kvkeep.evaluation.splits import WHOLE, hash_order, ids_sha256, part_of, split

# Names (no problems) of MATH-500, in the order of its file.
MATH500 = (Path(__file__).parent / "data" / "math500_ids.txt").read_text().split()


def test_math500_splits_201_to_299() -> None:
    """Another split would let problems seen while tuning into a confirmation, unnoticed."""
    parts = split(MATH500)
    assert (len(parts.dev), len(parts.confirm)) == (201, 299)
    assert ids_sha256(parts.dev) == "ef8b26fd453ffb961885d3f29c8e167505246aced55217d2fc7e08ce66cf122a"
    assert ids_sha256(parts.confirm) == "22e0cbb10c49847f0218befebb550f887cbba85631da58419325b8bb55d1ec38"
    assert parts.as_dict()["dev"] == {"problems": 201, "ids_sha256": ids_sha256(parts.dev)}


def test_order_of_rows_does_not_matter() -> None:
    """A data file sorted anew must not move problems between the parts or change the fingerprint."""
    backwards = split(reversed(MATH500))
    assert set(backwards.dev) == set(split(MATH500).dev)
    assert backwards.dev[0] == split(MATH500).dev[-1]
    assert ids_sha256(backwards.dev) == ids_sha256(split(MATH500).dev)


def test_hash_order_is_a_shuffle_that_everybody_shares() -> None:
    """Looking at the first 50 of a sorted file would look at one subject only."""
    ordered = hash_order(MATH500)
    assert ordered == hash_order(sorted(MATH500))
    assert ordered != sorted(MATH500)
    assert ordered[0] == min(MATH500, key=lambda name: hashlib.md5(name.encode()).hexdigest())
    assert part_of(ordered[0]) in ("dev", "confirm")


def test_small_sets_are_not_parted() -> None:
    """Twelve problems to tune on and eighteen to confirm on are too few for either."""
    years = {name: {part_of(f"{name}/{i}") for i in range(30)} for name in WHOLE}
    assert years["aime24"] == {"dev"}
    assert all(parts == {"confirm"} for name, parts in years.items() if name != "aime24")
    assert {part_of(f"aime2400/{i}") for i in range(30)} == {"dev", "confirm"}


def test_two_problems_of_one_name_are_refused() -> None:
    """Their samples would overwrite each other in the log."""
    with pytest.raises(ConfigError, match="the first is 'b'"):
        split(["a", "b", "b"])
