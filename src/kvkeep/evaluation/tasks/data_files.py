"""Reading the data file of a task: found, complete, and the very file that results refer to."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvkeep.core.errors import ConfigError, DataFileError
from kvkeep.evaluation.extras import need

ENVIRONMENT = "KVKEEP_DATA"


@dataclass(frozen=True, kw_only=True)
class DataFile:
    """A file of JSON lines as its publisher made it.

    Parameters
    ----------
    path
        Where it stands below the data folder, for example ``"gsm8k/test.jsonl"``.
    editions
        Number of rows by sha256 (hex): every version of the file that is known to be good.
    origin
        Where a user gets it.
    """

    path: str
    editions: Mapping[str, int]
    origin: str


def locate(file: DataFile, data: str | os.PathLike[str] | None) -> Path:
    """Find the file: ``data`` (the file, or a folder that holds it), else the folder in ``KVKEEP_DATA``.

    Raises
    ------
    DataFileError
        If it is nowhere; says where it was looked for and where it can be had.
    """
    places = [Path(place) for place in (data, os.environ.get(ENVIRONMENT)) if place]
    tried = []
    for place in places:
        for candidate in (place, place / file.path):
            if candidate.is_file():
                return candidate
            tried.append(candidate)
    looked = (
        f"looked at {', '.join(map(str, tried))}" if tried else f"neither --data nor {ENVIRONMENT} is set"
    )
    raise DataFileError(
        f"the data file {file.path} was not found ({looked}). Get it from {file.origin}, and name the "
        f"file or the folder that holds {file.path} with --data or {ENVIRONMENT}."
    )


def read_rows(file: DataFile, data: str | os.PathLike[str] | None) -> tuple[list[dict[str, Any]], str]:
    """Read and verify a data file.

    Returns
    -------
    tuple
        The rows, and the sha256 of the file.

    Raises
    ------
    DataFileError
        If the file is missing, truncated or changed.
    """
    path = locate(file, data)
    content = path.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    # The last line may lack its newline: count what stands between newlines, not the newlines.
    lines = [line for line in content.split(b"\n") if line.strip()]
    if found not in file.editions:
        counts = sorted(set(file.editions.values()))
        raise DataFileError(
            f"{path} is not the published {file.path}: it has {len(lines)} rows and sha256 {found[:16]}…, "
            f"expected {' or '.join(map(str, counts))} rows and "
            f"{' or '.join(known[:16] + '…' for known in file.editions)}. It is truncated or was changed; "
            f"get it again from {file.origin}."
        )
    expected = file.editions[found]
    rows = [json.loads(line) for line in lines]
    if len(rows) != expected:
        raise DataFileError(f"{path} has {len(rows)} rows, expected {expected}.")
    return rows, found


def hub_rows(
    dataset: str, *, split: str, config: str | None = None, files: str | None = None
) -> list[dict[str, Any]]:
    """Read a data set of the Hugging Face hub (needs the package ``datasets`` and a network or cache).

    Parameters
    ----------
    files
        Read these JSON Lines files of the set (a pattern) instead of running its loading script.

    Raises
    ------
    MissingExtraError
        Without the package.
    DataFileError
        If the set cannot be loaded; a gated one needs a login.
    """
    datasets = need("datasets", extra="hub", purpose=f"loading {dataset} from the hub")
    try:
        if files is None:
            rows = datasets.load_dataset(dataset, config, split=split)
        else:
            rows = datasets.load_dataset("json", data_files=f"hf://datasets/{dataset}/{files}", split=split)
        return [dict(row) for row in rows]
    except Exception as error:  # the hub raises many kinds
        raise DataFileError(
            f"{dataset} cannot be loaded from the hub ({type(error).__name__}: {error}). It may be gated "
            "(log in with `hf auth login`), or there is no network: name a local file with --data."
        ) from error


def local_or_hub(
    data: str | os.PathLike[str] | None, path: str, fetch: Callable[[], list[dict[str, Any]]]
) -> tuple[list[dict[str, Any]], str]:
    """Rows of a local JSON Lines file if one is named and there, else those of the hub.

    For sets that may not be passed on: no hash is known beforehand, so the caller checks the count and the
    header of a run states the hash.
    """
    for place in (Path(place) for place in (data, os.environ.get(ENVIRONMENT)) if place):
        for candidate in (place, place / path):
            if candidate.is_file():
                content = candidate.read_bytes()
                rows = [json.loads(line) for line in content.split(b"\n") if line.strip()]
                return rows, hashlib.sha256(content).hexdigest()
    if data is not None:
        raise DataFileError(f"there is no {path} at {data}: name the file or the folder that holds it.")
    rows = fetch()
    return rows, rows_fingerprint(rows)


def content_id(prefix: str, text: str) -> str:
    """A stable id for a problem without one: hash of its text, white space normalised."""
    digest = hashlib.sha256(" ".join(text.split()).encode()).hexdigest()
    return f"{prefix}/{digest[:16]}"


def rows_fingerprint(rows: list[dict[str, Any]]) -> str:
    """sha256 of rows that came without a file."""
    if not rows:
        raise ConfigError("the data set is empty.")
    text = json.dumps(rows, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
