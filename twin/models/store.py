"""Finding and reading models: a shipped name, or the path of a JSON file."""

from functools import cache
from pathlib import Path
from typing import Any

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
    raw = _with_parent(read_json(path), path)
    try:
        return msgspec.convert(raw, ModelSpec)
    except (msgspec.ValidationError, ValueError) as wrong:
        raise wrong if isinstance(wrong, BadFile) else BadFile(f"{path}: {wrong}") from None


def _with_parent(raw: Any, path: Path) -> Any:
    """`raw` laid over the shipped model that it extends, key by key; a key that it has replaces the parent's whole."""
    if not isinstance(raw, dict) or "extends" not in raw:
        return raw
    own = {key: value for key, value in raw.items() if key != "extends"}
    parent = raw["extends"]
    if parent not in model_names() or DATA / f"{parent}.json" == path:
        raise BadFile(f"{path}: extends {parent!r}, which is not another shipped model", hint=", ".join(model_names()))
    base = _with_parent(read_json(DATA / f"{parent}.json"), path)
    return {**base, **own}
