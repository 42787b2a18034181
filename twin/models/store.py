"""Finding and reading models: a shipped name, or the path of a JSON file."""

import re
from functools import cache
from operator import or_
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from hwprofiles.files import extended, is_path, read_json
from hwprofiles.spelling import match, suggestions
from twin.errors import BadFile, UnknownName
from twin.models.spec import ModelSpec

DATA = Path(__file__).parent / "data"
ACCEPTANCE = DATA.parent / "acceptance"
QUALITY = DATA.parent / "quality"

SCHEMA_1 = "twin.model/1"  # of version 0.1.0

Row = TypeVar("Row", bound=Struct)

_INSTEAD = "--model reads a shipped name or JSON of schema twin.model/1: twin models NAME --json shows it"
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def model_names() -> list[str]:
    """Names of the shipped models."""
    return sorted(path.stem for path in DATA.glob("*.json"))


def load_model(name: str) -> ModelSpec:
    """The model called `name` (case and separators aside) or read from a file. Raises UnknownName or BadFile."""
    known = match(name, model_names())
    if known is not None:
        return _shipped(known)
    # owner/model, and no folder of that owner is here
    if _HUB_NAME.fullmatch(name) and not name.endswith(".json") and not Path(name).parent.is_dir():
        near = suggestions(name.split("/")[1], model_names())
        meant = f"did you mean {' or '.join(near)}? " if near else ""
        raise BadFile(f"{name}: no such file, and names on a hub are not looked up", hint=f"{meant}{_INSTEAD}")
    if is_path(name):
        from hwprofiles.recognition import MODEL, recognised  # noqa: PLC0415 - a shipped model needs none

        with recognised(Path(name), MODEL, instead=_INSTEAD):
            return _parse(Path(name))
    raise UnknownName("model", name, model_names())


@cache
def _shipped(name: str) -> ModelSpec:
    return _parse(DATA / f"{name}.json")


def _parse(path: Path) -> ModelSpec:
    """A key of a file that extends a shipped model replaces the parent's whole: a table that is written is complete."""
    raw = extended(read_json(path), path, ("model", model_names(), lambda name: read_json(DATA / f"{name}.json"), or_))
    try:
        if isinstance(raw, dict) and raw.get("schema") == SCHEMA_1:
            from twin.models.version_1 import ModelV1  # noqa: PLC0415 - few files are so old

            return msgspec.convert(raw, ModelV1).renewed()
        return msgspec.convert(raw, ModelSpec)
    except (msgspec.ValidationError, ValueError) as wrong:
        raise wrong if isinstance(wrong, BadFile) else BadFile(f"{path}: {wrong}") from None


@cache
def published(folder: Path, family: str, kind: type[Row]) -> tuple[Row, ...]:
    """What is published of a family of models in `folder`: rows of a `kind`, or none. Raises BadFile."""
    path = folder / f"{family}.json"
    if "/" in family or not path.exists():
        return ()
    try:
        rows: tuple[Row, ...] = msgspec.convert(read_json(path), tuple[kind, ...])  # type: ignore[valid-type]
    except msgspec.ValidationError as wrong:
        raise BadFile(f"{path}: {wrong}") from None
    return rows
