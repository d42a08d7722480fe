"""Sealing a study: reading its file, writing the hash of its content beside it, and checking that later."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

from kvkeep.core.errors import ConfigError, DataFileError, EvidenceError
from kvkeep.core.files import atomic_path
from kvkeep.evaluation.extras import need
from kvkeep.evaluation.preregistration import Preregistration


def load(path: str | Path) -> Preregistration:
    """Read a study, frozen or not.

    Raises
    ------
    DataFileError
        If there is no such file.
    ConfigError
        If it is not YAML, or fields are missing, unknown or out of range: all of them are named.
    """
    from pydantic import ValidationError  # after Preregistration, which says how to install it

    source = Path(path)
    if not source.is_file():
        raise DataFileError(f"there is no pre-registration at {source}.")
    yaml = need("yaml", extra="eval", purpose="a pre-registration")
    try:
        content = yaml.safe_load(source.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not YAML: {' '.join(str(error).split())}.") from error
    try:
        return Preregistration.model_validate(content)
    except ValidationError as error:
        found = [
            f"{'.'.join(map(str, each['loc'])) or 'the file'}: {each['msg'].removeprefix('Value error, ')}"
            for each in error.errors()
        ]
        raise ConfigError(f"{source} is no pre-registration: {'; '.join(found)}.") from error


def lock_path(path: str | Path) -> Path:
    """Where the seal of a study lies: beside it, with ``.lock`` added to the name."""
    return Path(f"{path}.lock")


def freeze(path: str | Path) -> str:
    """Seal a study and return the hash of its content. Sealing it again changes nothing.

    Raises
    ------
    EvidenceError
        If it was frozen with another content, or has deviations before there is anything to deviate from.
    """
    study, lock = load(path), lock_path(path)
    if lock.exists():
        load_frozen(path)
        return study.sha256
    if study.deviations:
        raise EvidenceError(
            f"{path} cannot be frozen", ["it lists deviations: write the plan itself instead"]
        )
    seal = {
        "study": study.study,
        "sha256": study.sha256,
        "frozen": datetime.now(UTC).isoformat("T", "seconds"),
    }
    with atomic_path(lock) as temporary:
        temporary.write_text(json.dumps(seal, indent=2) + "\n", encoding="utf-8")
    return study.sha256


def load_frozen(path: str | Path) -> Preregistration:
    """Read a study and check that it is what was sealed.

    Raises
    ------
    EvidenceError
        If it was never frozen, or was changed afterwards.
    """
    study, lock = load(path), lock_path(path)
    if not lock.is_file():
        raise EvidenceError(
            f"{path} is not frozen", [f"there is no {lock.name} beside it: freeze it before the first run"]
        )
    try:
        sealed = str(json.loads(lock.read_text(encoding="utf-8"))["sha256"])
    except (ValueError, KeyError, TypeError) as error:
        raise DataFileError(f"{lock} is damaged: restore it from where the study was published.") from error
    if sealed != study.sha256:
        raise EvidenceError(
            f"{path} was changed after it was frozen",
            [
                f"its content hashes to {study.sha256[:12]}…, the seal says {sealed[:12]}…",
                "restore it, and write what you did otherwise under deviations",
            ],
        )
    return study
