"""Where the weights lie that come with kvkeep; knows files only, so that asking costs nothing."""

from pathlib import Path

from kvkeep.core.errors import ConfigError

MODELS = Path(__file__).parent / "models"
#: Apart from the models: some engines load every weight file of a model's folder.
GATES = Path(__file__).parent / "gates"


def shipped_models() -> list[str]:
    """Return the names of the models that come with kvkeep."""
    return sorted(config.parent.name for config in MODELS.glob("*/config.json"))


def shipped_model(name: str) -> Path:
    """Return the folder of a shipped model.

    Raises
    ------
    ConfigError
        If no model of that name is shipped.
    """
    known = shipped_models()
    if name in known:
        return MODELS / name
    if not known:
        raise ConfigError(
            f"the weights of {name!r} are not part of this copy of kvkeep: train them with "
            "`python -m kvkeep.testbed.train --out DIR` and give --model DIR/model, or give any other model."
        )
    raise ConfigError(f"no model {name!r} comes with kvkeep. Choose one of {', '.join(known)}.")


def shipped_gates() -> dict[str, Path]:
    """Return the gates that come with kvkeep, by name."""
    return {path.stem: path for path in sorted(GATES.glob("*.safetensors"))}
