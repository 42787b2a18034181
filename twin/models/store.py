"""Finding and reading models: a shipped name, a file or folder of one's own, a name on a hub."""

import os
import re
from functools import cache
from operator import or_
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from hwprofiles.files import Table, check_finite, extended, is_path, read_json
from hwprofiles.recognition import CONFIG, MODEL, recognised
from hwprofiles.spelling import match, suggestions
from twin.errors import BadFile, UnknownName
from twin.models.fields import Understood
from twin.models.spec import ModelSpec

DATA = Path(__file__).parent / "data"
ACCEPTANCE = DATA.parent / "acceptance"
QUALITY = DATA.parent / "quality"
SCHEMA_1 = "twin.model/1"  # of version 0.1.0

Row = TypeVar("Row", bound=Struct)

_INSTEAD = "--model reads a shipped name, a config.json or its folder, a GGUF, org/name, or JSON of schema twin.model/2"
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def model_names() -> list[str]:
    """Names of the shipped models."""
    return sorted(path.stem for path in DATA.glob("*.json"))


def load_model(what: str) -> ModelSpec:
    """The model that `what` means; raises as `understand` does."""
    known = match(what, model_names())
    return _shipped(known) if known is not None else understand(what).spec


def understand(what: str) -> Understood:
    """The model called `what` (case and separators aside) or described by the file or folder there.

    Raises UnknownName or BadFile. No code that lies beside a model is run, and no tensor is read.
    """
    known = match(what, model_names())
    if known is not None:
        return _plain(_shipped(known), known)
    path = Path(what)
    if _HUB_NAME.fullmatch(what) and not what.endswith((".json", ".gguf")) and not path.parent.is_dir():
        from twin.models.hub import find  # noqa: PLC0415 - few questions are about names on a hub

        near = suggestions(what.split("/")[1], model_names())
        meant = f"did you mean {' or '.join(near)}? " if near else ""
        return _in_folder(find(what, hint=f"{meant}{_INSTEAD}"), name=path.name)
    if what and path.is_dir():
        return _in_folder(path, name=_name_of(path))
    if what.endswith(".gguf"):
        return _gguf(path)
    if is_path(what):
        return _in_file(path)
    raise UnknownName("model", what, model_names())


@cache
def _shipped(name: str) -> ModelSpec:
    return _described(read_json(DATA / f"{name}.json"), DATA / f"{name}.json")


def _plain(spec: ModelSpec, where: str) -> Understood:
    """A model in the project's own format, all of whose keys are known."""
    return Understood(spec=spec, origins={"schema": f"{spec.schema} of {where}"}, ignored=())


def _in_file(path: Path) -> Understood:
    with recognised(path, MODEL, CONFIG, instead=_INSTEAD):
        raw = read_json(path, finite=False)
        if not (isinstance(raw, dict) and raw.keys() & _OF_CONFIG and not raw.keys() & {"schema", "extends"}):
            check_finite(raw, path)
            return _plain(_described(raw, path), str(path))
    return _config(raw, path, name=path.stem if path.name != "config.json" else _name_of(path.parent))


_OF_CONFIG = {"architectures", "model_type"}


def _in_folder(folder: Path, *, name: str) -> Understood:
    """A folder with a config.json, a hub cache's folder of a model, or one with a single GGUF."""
    from twin.models.hub import snapshot  # noqa: PLC0415

    folder = snapshot(folder)
    path = folder / "config.json"
    if os.path.lexists(path):
        raw = read_json(path, finite=False)
        if not isinstance(raw, dict):
            raise BadFile(f"{path}: not a JSON object")
        return _config(raw, path, name=name)
    models = sorted(each for each in folder.glob("*.gguf") if not each.name.startswith("mmproj"))
    firsts = [each for each in models if "-of-" not in each.name or "-00001-of-" in each.name]
    if len(firsts) == 1:
        return _gguf(firsts[0])
    held = f"{len(firsts)} GGUF models: name one of them" if firsts else "neither config.json nor a GGUF"
    raise BadFile(f"{folder}: a folder with {held}", hint=_INSTEAD)


def _name_of(folder: Path) -> str:
    """What its model is called: in a hub's cache models--org--name/snapshots/commit, elsewhere as the folder is."""
    folder = folder.resolve()
    kept = folder.parent.parent if folder.parent.name == "snapshots" else folder
    return kept.name.split("--")[-1] if kept.name.startswith("models--") else kept.name


def _config(raw: Table, path: Path, *, name: str) -> Understood:
    from twin.models.config import read_config  # noqa: PLC0415 - a shipped model needs none
    from twin.models.config.quantization import quantisation_beside  # noqa: PLC0415

    if path.name != "config.json":  # one of many in a folder of configurations: nothing there belongs to it
        return read_config(raw, str(path), name=name)
    folder = path.parent
    found = read_config(raw, str(path), name=name, beside=quantisation_beside(folder))
    if folder.parent.name != "snapshots" and not any(".safetensors" in held for held in os.listdir(folder)):
        return found
    from twin.models.checkpoint import with_checkpoint  # noqa: PLC0415 - a config.json alone needs none

    return with_checkpoint(found, folder)


def _gguf(path: Path) -> Understood:
    from twin.models.gguf import read_gguf  # noqa: PLC0415 - as above

    return read_gguf(path)


def _described(raw: object, path: Path) -> ModelSpec:
    """A key of a file that extends a shipped model replaces the parent's whole: a table that is written is complete."""
    whole = extended(raw, path, ("model", model_names(), lambda name: read_json(DATA / f"{name}.json"), or_))
    try:
        if isinstance(whole, dict) and whole.get("schema") == SCHEMA_1:
            from twin.models.version_1 import ModelV1  # noqa: PLC0415 - few files are so old

            return msgspec.convert(whole, ModelV1).renewed()
        return msgspec.convert(whole, ModelSpec)
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
