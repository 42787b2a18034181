"""Finding and reading models: a shipped name, a file or folder of one's own, a name on a hub."""

import os
import re
from functools import cache
from operator import or_
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

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


def model_summaries() -> dict[str, str]:
    """What each shipped model is in a line, as its file has it: no model is read for a list."""
    return {name: read_json(DATA / f"{name}.json")["summary"] for name in model_names()}


def load_model(what: str) -> ModelSpec:
    """The model that `what` means; raises as `understand` does."""
    return understand(what).spec


def understand(what: str) -> Understood:
    """The model called `what` (case and separators aside) or described by the file or folder there.

    Raises UnknownName or BadFile. No code that lies beside a model is run, and no tensor is read.
    """
    known = match(what, model_names())
    if known is not None:
        return _shipped(known)
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
    listed = "those that `twin models` lists; a config.json or its folder, a GGUF and org/name are read, too"
    raise UnknownName("model", what, model_names(), listed=listed)


class _Published(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A config.json in its publisher's words, with what it is and where it is from."""

    source: str
    summary: str
    config: Table


@cache
def _shipped(name: str) -> Understood:
    path = DATA / f"{name}.json"
    raw = read_json(path)
    return _published(raw, path, name=name) if "config" in raw else _plain(_described(raw, path), name)


def _published(raw: Table, path: Path, *, name: str) -> Understood:
    """A file that holds somebody's config.json, which is read as any other."""
    from twin.models.config import read_config  # noqa: PLC0415 - the default model needs none

    try:
        kept = msgspec.convert(raw, _Published)
    except msgspec.ValidationError as wrong:
        raise BadFile(f"{path}: {wrong}") from None
    found = read_config(kept.config, str(path), name=name)
    return replace(found, spec=replace(found.spec, source=kept.source, summary=kept.summary))


def _parent(name: str) -> Any:
    """A shipped model as it can be extended: in the project's own format."""
    raw = read_json(DATA / f"{name}.json")
    return msgspec.to_builtins(_shipped(name).spec) if "config" in raw else raw


def _plain(spec: ModelSpec, where: str) -> Understood:
    """A model in the project's own format, all of whose keys are known."""
    return Understood(spec=spec, origins={"schema": f"{spec.schema} of {where}"}, ignored=())


def _in_file(path: Path) -> Understood:
    with recognised(path, MODEL, CONFIG, instead=_INSTEAD):
        raw = read_json(path, finite=False)
        keys = raw.keys() if isinstance(raw, dict) else set()
        if "config" not in keys and (not keys & _OF_CONFIG or keys & {"schema", "extends"}):
            check_finite(raw, path)
            return _plain(_described(raw, path), str(path))
    if "config" in keys:
        return _published(raw, path, name=path.stem)
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
    from twin.models.config.quantisation import quantisation_beside  # noqa: PLC0415

    if path.name != "config.json":  # one of many in a folder of configurations: nothing there belongs to it
        return read_config(raw, str(path), name=name)
    folder = path.parent
    found = read_config(raw, str(path), name=name, beside=quantisation_beside(folder))
    if folder.parent.name != "snapshots" and not _holds_tensors(folder):
        return found
    from twin.models.checkpoint import with_checkpoint  # noqa: PLC0415 - a config.json alone needs none

    return with_checkpoint(found, folder)


def _holds_tensors(folder: Path) -> bool:
    """Whether a checkpoint or its index may be there; of a folder that cannot be listed its config.json is read."""
    try:
        return any(".safetensors" in held for held in os.listdir(folder))
    except PermissionError:
        return False


def _gguf(path: Path) -> Understood:
    from twin.models.gguf import read_gguf  # noqa: PLC0415 - as above

    return read_gguf(path)


def _described(raw: object, path: Path) -> ModelSpec:
    """A key of a file that extends a shipped model replaces the parent's whole: a table that is written is complete."""
    whole = extended(raw, path, ("model", model_names(), _parent, or_))
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
