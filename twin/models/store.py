"""Finding and reading models: a shipped name, or the path of a JSON file."""

from functools import cache
from pathlib import Path

import msgspec

from hwprofiles.store import read_json
from twin.errors import BadFile, UnknownName
from twin.models.spec import ModelSpec

DATA = Path(__file__).parent / "data"


def model_names() -> list[str]:
    """Names of the shipped models."""
    return sorted(path.stem for path in DATA.glob("*.json"))


def load_model(name: str) -> ModelSpec:
    """The model called `name`, or read from the file `name` if it looks like a path.

    Raises UnknownName for a name that is not shipped, BadFile for a file that is not a model.
    """
    if name in model_names():
        return _shipped(name)
    if "/" in name or name.endswith(".json"):
        return _parse(Path(name))
    raise UnknownName("model", name, model_names())


@cache
def _shipped(name: str) -> ModelSpec:
    return _parse(DATA / f"{name}.json")


def _parse(path: Path) -> ModelSpec:
    try:
        return msgspec.convert(read_json(path), ModelSpec)
    except (msgspec.ValidationError, ValueError) as wrong:
        raise wrong if isinstance(wrong, BadFile) else BadFile(f"{path}: {wrong}") from None
