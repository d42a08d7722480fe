"""Models and tokenizers for the commands, with one sentence for everything that can be wrong with them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvkeep.core.errors import ConfigError, DataFileError, UnknownNameError, UnsupportedError

DTYPES = ("float32", "bfloat16", "float16")
ATTENTION = ("sdpa", "eager", "flash_attention_2", "flash_attention_3")


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model ready to generate.

    Parameters
    ----------
    name
        What the user called it.
    model, tokenizer
        Of transformers; the tokenizer pads on the left.
    """

    name: str
    model: Any
    tokenizer: Any


def one_of(kind: str, name: str, known: Iterable[str]) -> str:
    """Check a name against the names there are."""
    if name not in (names := tuple(known)):
        raise UnknownNameError(kind, name, names)
    return name


def quiet_transformers(source: str) -> None:
    """Make transformers as quiet as our output needs; must run before it is imported."""
    if Path(source).expanduser().exists():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a folder needs no look at the hub
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def resolve(name: str, say: Callable[[str], None]) -> str:
    """The folder or hub id behind a model's name.

    ``demo`` is the model of ``kvkeep demo``; ``trace-1`` and its like are reasoners that come with kvkeep.

    Raises
    ------
    ConfigError
        If the weights of a built-in reasoner are not there.
    """
    if name != "demo":
        if Path(name).expanduser().exists():
            return str(Path(name).expanduser())
        if not name.startswith("trace-"):
            return name
        from kvkeep.testbed.shipped import shipped_model

        return str(shipped_model(name))
    from kvkeep.cli.demo_model import demo_model_folder, demo_model_ready, fetch_demo_model

    if not demo_model_ready():
        quiet_transformers(".")
        fetch_demo_model(say)
    return str(demo_model_folder())


def load_config(source: str) -> Any:
    """Read a model's config.

    Raises
    ------
    DataFileError
        If there is none.
    """
    place = Path(source)
    if place.is_file():
        raise DataFileError(f"{source} is a file: give the folder of a model, or the id of one on a hub.")
    if not place.exists() and (source.startswith((".", "/", "~")) or source.count("/") > 1):
        raise DataFileError(f"there is no folder {source}: give a folder that holds a model, or a hub id.")
    quiet_transformers(source)
    from transformers import AutoConfig

    return _reading(source, lambda: AutoConfig.from_pretrained(source))


def load_model(source: str, *, dtype: str, attention: str, device: str, threads: int | None) -> Loaded:
    """Load a model and its tokenizer.

    Raises
    ------
    UnknownNameError, ConfigError
        If dtype or attention is none that there is, or none that works here.
    DataFileError
        If the model is missing, damaged, incomplete, or has no tokenizer.
    UnsupportedError
        If it is no causal language model.
    """
    one_of("dtype", dtype, DTYPES)
    check_attention(one_of("attention", attention, ATTENTION), dtype)
    config = load_config(source)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if threads is not None:
        if threads < 1:
            raise ConfigError(f"{threads} threads are too few: give at least 1.")
        torch.set_num_threads(threads)
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise UnsupportedError(
            f"cannot generate with {source}", [f"{config.model_type!r} is not a causal language model"]
        )
    tokenizer = _reading(source, lambda: AutoTokenizer.from_pretrained(source))
    model, info = _reading(
        source,
        lambda: AutoModelForCausalLM.from_pretrained(
            source, dtype=getattr(torch, dtype), attn_implementation=attention, output_loading_info=True
        ),
    )
    if missing := sorted(info["missing_keys"]):
        raise DataFileError(
            f"the model at {source} is incomplete: {len(missing)} weights are missing, {missing[0]} among "
            "them. Download or convert it again."
        )
    tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return Loaded(name=source, model=model.to(device_named(device)).eval(), tokenizer=tokenizer)


def check_attention(attention: str, dtype: str) -> None:
    """Refuse flash attention where it cannot run; transformers would find out with the model in hand.

    Raises
    ------
    ConfigError
        Naming the package, and what works here.
    """
    quiet_transformers(".")
    from transformers import utils

    packages = {
        "flash_attention_2": ("flash-attn", utils.is_flash_attn_2_available()),
        "flash_attention_3": ("flash-attn-3", utils.is_flash_attn_3_available()),
    }
    package, here = packages.get(attention, ("", True))
    if not here:
        working = [name for name in ATTENTION if packages.get(name, ("", True))[1]]
        raise ConfigError(
            f"attention {attention!r} needs the package {package} and a GPU, and one of both is missing: "
            f"install it, or use --attention {' or '.join(working)}."
        )
    if package and dtype == "float32":
        raise ConfigError(f"attention {attention!r} does not know float32: add --dtype bfloat16 or float16.")


def load_calibration(path: Path | None, loaded: Loaded) -> Any:
    """Read a calibration file and check that it belongs to the model; ``None`` stays ``None``."""
    if path is None:
        return None
    from kvkeep.calibration import load

    return load(path, loaded.model)


def load_gates(path: Path | None, loaded: Loaded, *, retention: bool = False) -> Any:
    """Read gates to where the model is, and check that they belong to it; ``None`` stays ``None``.

    Parameters
    ----------
    retention
        Whether only retention gates will do.

    Raises
    ------
    ConfigError
        If they are block gates, and will not do.
    """
    if path is None:
        return None
    from kvkeep.cli.report import note
    from kvkeep.engine.spec import model_spec
    from kvkeep.evaluation.identity import weights_hashes
    from kvkeep.gates import RetentionGates, load
    from kvkeep.testbed.shipped import shipped_gates

    if not path.exists():  # trace-1-blocks and its like come with kvkeep
        path = shipped_gates().get(str(path), path)

    own = weights_hashes(loaded.model)
    gates = load(path, model_spec(loaded.model.config), base_sha256=own)
    if retention and not isinstance(gates, RetentionGates):
        raise ConfigError(
            f"{path} holds block gates, which say what is read and nothing about how long a token is needed: "
            "give retention gates (`kvkeep gates train` makes them)."
        )
    if gates.base is None:
        note(f"{path} does not say by which weights it was trained: only sizes were checked.")
    return gates.to(loaded.model.device)


def device_named(name: str) -> Any:
    """The torch device behind a name; ``auto`` is the first GPU, or the CPU."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r} is unknown: use auto, cpu, cuda or cuda:1.") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not supported: use auto, cpu, cuda or cuda:1.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r} was asked for, but torch sees no GPU: use --device cpu.")
    return device


def _reading(source: str, read: Callable[[], Any]) -> Any:
    """Call a loader of transformers; whatever it trips over is a fault of the files it was given."""
    try:
        return read()
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        found = Path(source).is_dir()
        raise DataFileError(
            f"cannot load a model from {source}: {lines[0].rstrip('.')}. "
            + (
                "Files of the folder are missing or damaged: download or convert it again."
                if found
                else "Give a folder that holds a model, or an id of a hub that is within reach."
            )
        ) from error
