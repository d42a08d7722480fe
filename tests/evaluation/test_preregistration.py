"""The sealed plan."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvkeep.core.errors import ConfigError, DataFileError, EvidenceError
from kvkeep.evaluation.seal import freeze, load, load_frozen, lock_path
from tests.evaluation.studies import plan, write

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def test_frozen_is_read_back(tmp_path: Path) -> None:
    """A plan that cannot be read again confirms nothing."""
    path = write(tmp_path, plan())
    sealed = freeze(path)
    study = load_frozen(path)
    assert study.sha256 == sealed == json.loads(lock_path(path).read_text())["sha256"]
    assert [cell.name for cell in study.cells] == ["sums/tiny/32", "sums/tiny/64"]
    assert freeze(path) == sealed


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("correction: bonferroni", "correction: holm"),
        ("seed: 2026", "seed: 2027"),
        ("baseline: 32", "baseline: 33"),
        ("temperature: 0.6", "temperature: 0.7"),
        ("buffer: 8", "buffer: 9"),
        ("A: claim it", "A: claim it!"),
    ],
)
def test_one_changed_character_breaks_the_seal(tmp_path: Path, old: str, new: str) -> None:
    """A plan that bends after the results are in is no plan."""
    path = write(tmp_path, plan())
    freeze(path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(EvidenceError, match="was changed after it was frozen"):
        load_frozen(path)
    with pytest.raises(EvidenceError, match="was changed after it was frozen"):
        freeze(path)


def test_every_value_is_under_the_seal(tmp_path: Path) -> None:
    """A number left out of the hash would be the one that gets changed."""
    path = write(tmp_path, plan())
    sealed, text = freeze(path), path.read_text()
    for match in re.finditer(r"(?<=: )[1-9]\d*$", text, re.MULTILINE):
        path.write_text(text[: match.start()] + str(int(match[0]) + 1) + text[match.end() :])
        try:
            changed = load(path).sha256
        except ConfigError:
            continue  # another number there is no plan at all
        assert changed != sealed, match


def test_gates_are_under_the_seal_and_older_seals_hold(tmp_path: Path) -> None:
    """A field that came later must not break what was sealed before, nor stand outside of the seal."""
    for study in sorted(RESULTS.glob("*.yaml")):
        assert load_frozen(study).sha256
    content = plan()
    plain = load(write(tmp_path, content)).sha256
    content["cells"][0]["gates_sha256"] = {"challenger": "d" * 64}
    one = load(write(tmp_path, content)).sha256
    content["cells"][0]["gates_sha256"] = {"baseline": "d" * 64}
    assert len({plain, one, load(write(tmp_path, content)).sha256}) == 3


def test_comments_and_deviations_may_follow(tmp_path: Path) -> None:
    """What went otherwise must be writable, or it will be left unsaid."""
    path = write(tmp_path, plan())
    sealed = freeze(path)
    path.write_text("# a remark\n" + path.read_text() + "deviations: [the machine was changed]\n")
    assert load_frozen(path).sha256 == sealed
    assert load_frozen(path).deviations == ("the machine was changed",)


def test_a_plan_cannot_begin_with_deviations_or_without_a_seal(tmp_path: Path) -> None:
    """The seal comes first."""
    path = write(tmp_path, plan(deviations=["none yet"]))
    with pytest.raises(EvidenceError, match="cannot be frozen"):
        freeze(path)
    with pytest.raises(EvidenceError, match="is not frozen"):
        load_frozen(path)
    freeze(write(tmp_path, plan()))
    lock_path(path).write_text("{}")
    with pytest.raises(DataFileError, match="damaged"):
        load_frozen(path)


def test_mistakes_are_named_together(tmp_path: Path) -> None:
    """Somebody who writes a plan should not have to guess its format."""
    content = plan(draws=2)
    del content["question"]
    content["analysis"] = {"seed": 1, "correction": "holmes"}
    content["cells"][0]["modle"] = "tiny"
    with pytest.raises(ConfigError) as refused:
        load(write(tmp_path, content))
    for part in ("question: Field required", "analysis.correction", "cells.0.modle: Extra inputs"):
        assert part in str(refused.value)
    crossed = plan(draws=2)
    crossed["cells"][0]["model"] = "huge"
    crossed["cells"].append(crossed["cells"][1])
    with pytest.raises(ConfigError, match=r"'huge'.*two cells.*2 draws need 2 different seeds"):
        load(write(tmp_path, crossed))
    dev = plan()
    dev["tasks"][0]["part"] = "dev"
    with pytest.raises(ConfigError, match=r"tasks\.0\.part: Input should be 'confirm'"):
        load(write(tmp_path, dev))
    with pytest.raises(DataFileError, match="no pre-registration"):
        load(tmp_path / "nothing.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [1,")
    with pytest.raises(ConfigError, match="not YAML"):
        load(broken)
