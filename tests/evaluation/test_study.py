"""Confirming a frozen study."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kvkeep
from kvkeep.core.errors import ConfigError, EvidenceError
from kvkeep.evaluation.identity import plain
from kvkeep.evaluation.preregistration import Preregistration
from kvkeep.evaluation.records import Run
from kvkeep.evaluation.seal import freeze, load, load_frozen
from kvkeep.evaluation.study import admit, confirm, locate
from tests.evaluation.runs import header, names
from tests.evaluation.studies import IDS, plan, study_run, write


@pytest.fixture
def study(tmp_path: Path) -> Preregistration:
    path = write(tmp_path, plan())
    freeze(path)
    return load_frozen(path)


def four(study: Preregistration, **changes: Any) -> list[Run]:
    """All runs; ``changes`` go to the challenger at 32."""
    return [
        study_run("challenger", 64, 2, study.sha256),
        study_run("baseline", 32, 4, study.sha256),
        study_run("baseline", 64, 2, study.sha256),
        study_run("challenger", 32, 1, study.sha256, **changes),
    ]


def reasons(study: Preregistration, runs: list[Run]) -> str:
    with pytest.raises(EvidenceError) as refused:
        confirm(study, runs)
    return "\n".join(refused.value.reasons)


def test_runs_find_their_place_and_the_program_decides(study: Preregistration) -> None:
    """The outcome is read off, not argued about."""
    family = confirm(study, four(study))
    assert list(family.comparisons) == ["sums/tiny/32", "sums/tiny/64"]
    assert family.comparisons["sums/tiny/32"].difference.estimate == pytest.approx(0.75)
    assert family.comparisons["sums/tiny/64"].difference.p == 1.0
    assert family.decision.sentence == (
        "Branch A: 1 of 2 cells better and 0 worse after Bonferroni correction at 0.05: "
        "sums/tiny/32 +75.00 pp (p = 0.0040). What follows: claim it."
    )
    assert family.preregistration == study.sha256


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"task_sha256": "d" * 64}, "task_sha256 is"),
        ({"sampling": {"preset": "vase", "temperature": 0.7}}, "registered as {'preset'"),
        ({"grader_version": "2"}, "grader_version is '2'"),
        ({"split": "dev"}, "split is 'dev'"),
        ({"prompt_sha256": "d" * 64}, "prompt_sha256"),
        ({"model_sha256": "d" * 64}, "no cell has model"),
        ({"calibration_sha256": "d" * 64}, "calibration_sha256"),
        ({"gates_sha256": "d" * 64}, "registered as None"),
        ({"seeds": (1, 2, 3)}, "seeds [1, 2, 3]"),
        ({"policy_options": plain(kvkeep.TOVA(budget=33, buffer=8).options())}, "no cell has"),
        ({"policy_options": plain(kvkeep.TOVA(budget=32, buffer=9).options())}, "no cell has"),
        ({"preregistration": None}, "was not made under this study"),
        ({"task": "products"}, "does not name"),
    ],
)
def test_what_was_not_registered_is_refused(
    study: Preregistration, change: dict[str, Any], reason: str
) -> None:
    """A study that tests something else than it announced has announced nothing."""
    assert reason in reasons(study, four(study, **change))


def test_a_run_is_let_in_before_it_touches_a_problem(study: Preregistration) -> None:
    """Found out afterwards, a wrong setting would have cost the held-out problems."""
    right = study_run("challenger", 32, 1, study.sha256, preregistration=None).header
    assert admit(right, study).preregistration == study.sha256
    with pytest.raises(EvidenceError, match=r"no part of study 'tova-on-sums'(.|\n)*no cell has"):
        admit(study_run("challenger", 33, 1, study.sha256).header, study)
    with pytest.raises(EvidenceError, match="no part of study"):
        admit(header(), study)
    with pytest.raises(EvidenceError, match="kvkeep study freeze"):
        admit(right, None)
    assert admit(header(), None) == header()


def test_dev_problems_cannot_confirm(study: Preregistration) -> None:
    """They are what the settings were chosen on."""
    leaked = {id: [True] * 3 for id in [*IDS[1:], *names("dev", 1)]}
    text = reasons(study, four(study, solved=leaked))
    assert "has 1 dev problems (q/" in text
    assert "ids_sha256" in text


def test_missing_and_surplus_runs_are_refused(study: Preregistration) -> None:
    """A cell left out after a look at it is a result thrown away."""
    assert "there is no run of sums/tiny/32, challenger" in reasons(study, four(study)[:3])
    assert "are both sums/tiny/32 challenger" in reasons(study, [*four(study), four(study)[3]])
    half = Run(header=four(study)[3].header, samples=four(study)[3].samples[:-1])
    assert "lacks 1 samples" in reasons(study, [*four(study)[:3], half])
    other = four(study, versions={"kvkeep": "0.2"})
    assert "versions is" in reasons(study, other)


def test_memory_is_printed_as_it_was_measured(study: Preregistration) -> None:
    """Budgets are matched on dev problems; tuning them again on held-out ones would be tuning."""
    notes = confirm(study, four(study, mean_cache=110.0)).comparisons["sums/tiny/32"].notes
    assert any("110.0 in the challenger (+10.0 %, allowed 2 %)" in note for note in notes)
    assert not any("kvkeep match" in note for note in notes)


def test_a_null_twin_differs_in_its_seeds_alone(tmp_path: Path) -> None:
    """Baseline against itself with other seeds shows how often the whole pipeline finds nothing at all."""
    content = plan()
    content["arms"]["challenger"] = {**content["arms"]["baseline"], "seeds": [21, 22, 23]}
    path = write(tmp_path, content)
    freeze(path)
    study = load_frozen(path)
    first = [study_run("baseline", size, 2, study.sha256) for size in (32, 64)]
    twins = [
        study_run("baseline", size, 2, study.sha256, run=f"twin-{size}", seeds=(21, 22, 23))
        for size in (32, 64)
    ]
    assert locate(study, twins[0].header)[0] == [(study.cells[0], "challenger")]
    assert confirm(study, [*first, *twins]).decision.branch == "B"


BITS = {"bits": 4, "protect": "range", "group": 32, "reserve": None, "recent": None}


def test_entries_in_few_bits_are_registered(tmp_path: Path) -> None:
    """A policy in four bits is another arm than the same policy in sixteen."""
    content = plan()
    content["arms"]["challenger"] = {**content["arms"]["baseline"], "precision": BITS}
    path = write(tmp_path, content)
    with pytest.raises(ConfigError, match="equal entries are not equal bytes; match on mean_memory"):
        freeze(path)
    path = write(tmp_path, {**content, "memory": {"match": "mean_memory"}})
    freeze(path)
    study = load_frozen(path)
    assert study.arms.challenger is not None
    few = study_run("baseline", 32, 1, study.sha256, run="few", precision=BITS)
    many = study_run("baseline", 32, 2, study.sha256)
    assert locate(study, few.header) == ([(study.cells[0], "challenger")], [])
    assert locate(study, many.header) == ([(study.cells[0], "baseline")], [])
    other = study_run("baseline", 32, 1, study.sha256, precision={**BITS, "bits": 2})
    assert "precision is" in "".join(locate(study, other.header)[1])
    large = [
        study_run("baseline", 64, 2, study.sha256, precision=bits, run=str(bits)) for bits in (None, BITS)
    ]
    with pytest.raises(EvidenceError) as refused:
        confirm(study, [other, many, *large])
    assert any("precision is {'bits': 2" in reason for reason in refused.value.reasons)
    # What was measured on held-out problems is said in bytes: no log of these runs has any.
    notes = confirm(study, [few, many, *large]).comparisons["sums/tiny/32"].notes
    assert any("mean_memory was not measured" in note for note in notes)


def several(**changes: Any) -> dict[str, Any]:
    """A study of two challengers, one of which only draws otherwise, against one baseline."""
    content = plan()
    hot = {"preset": "vase", "temperature": 1.0}
    content["arms"] = {
        "baseline": content["arms"]["baseline"],
        "challengers": {
            "tova": content["arms"]["challenger"],
            "hot": {**content["arms"]["baseline"], "sampling": hot},
        },
    }
    cell = {**content["cells"][0], "challenger": 32}
    content["cells"] = [{**cell, "arm": name} for name in ("tova", "hot")]
    return {**content, **changes}


def test_challengers_share_the_run_of_their_baseline(tmp_path: Path) -> None:
    """A family of mechanisms has one baseline; correction is for all of them."""
    path = write(tmp_path, several())
    freeze(path)
    study = load_frozen(path)
    hot = study_run(
        "baseline", 32, 2, study.sha256, run="hot", sampling={"preset": "vase", "temperature": 1.0}
    )
    runs = [
        study_run("baseline", 32, 4, study.sha256),
        study_run("challenger", 32, 1, study.sha256),
        hot,
    ]
    family = confirm(study, runs)
    gains = {name: each.difference.estimate for name, each in family.comparisons.items()}
    assert gains == pytest.approx({"sums/tiny/32/tova": 0.75, "sums/tiny/32/hot": 0.25})
    assert "there is no run of sums/tiny/32/hot, challenger" in reasons(study, runs[:2])
    assert "there is no run of sums/tiny/32/tova, baseline" in reasons(study, runs[1:])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"arms": {"baseline": {"policy": "random"}}}, "one of the two"),
        ({"arms": {**several()["arms"], "challenger": {"policy": "tova"}}}, "one of the two"),
        ({"cells": [{**several()["cells"][0], "arm": "nobody"}]}, "use one of ['hot', 'tova']"),
        ({"cells": plan()["cells"]}, "names arm None"),
    ],
)
def test_a_family_names_its_challengers(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    """Cells choose among the arms that the study has."""
    with pytest.raises(ConfigError) as refused:
        load(write(tmp_path, several(**change)))
    assert reason in str(refused.value)
