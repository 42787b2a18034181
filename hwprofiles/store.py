"""Finding and reading profiles: a shipped name, or the path of a JSON file."""

import json
from functools import cache
from math import isfinite
from os.path import isfile
from pathlib import Path
from typing import Any

import msgspec

from hwprofiles.errors import BadFile, NotShipped, UnknownName
from hwprofiles.extending import Table, extended
from hwprofiles.files import read_whole
from hwprofiles.profile import HardwareProfile, Kernel, Roof
from hwprofiles.renames import in_todays_words
from hwprofiles.spelling import is_accelerator, match, nearest, suggestions

DATA = Path(__file__).parent / "data"

_INSTEAD = (
    "--hw reads JSON of schema twin.hardware/1: twin calibrate -o FILE writes it, twin profiles NAME --json shows it"
)


def profile_names() -> list[str]:
    """Names of the shipped machines."""
    return sorted(path.parent.name for path in DATA.glob("*/profile.json"))


def load_profile(name: str) -> HardwareProfile:
    """The machine called `name` (case and separators aside), or read from the file `name` if it looks like a path.

    Raises UnknownName for a name that is not shipped, BadFile for a file that is not a profile.
    """
    names = profile_names()
    known = match(name, names)
    if known is not None:
        return _shipped(known)
    if is_path(name):
        from hwprofiles.recognition import PROFILE, recognised  # noqa: PLC0415 - a shipped machine needs none

        with recognised(Path(name), PROFILE, instead=_INSTEAD):
            return _parse(Path(name))
    if is_accelerator(name) and not suggestions(name, names):
        near = nearest(name, names)
        other = f"; the nearest, {near}, is another machine" if near else ""
        measure = "twin calibrate measures yours, --hw FILE takes a profile"
        raise NotShipped("machine", name, f"shipped: {', '.join(names)}{other}; {measure}")
    raise UnknownName("machine", name, names)


def is_path(name: str) -> bool:
    """Whether it means a file, and not something that is shipped under a name."""
    return "/" in name or name.endswith(".json") or isfile(name)


@cache
def _shipped(name: str) -> HardwareProfile:
    return _parse(DATA / name / "profile.json")


def _parse(path: Path) -> HardwareProfile:
    raw = extended(
        _read(path),
        path,
        kind="machine",
        names=profile_names(),
        shipped=lambda name: read_json(DATA / name / "profile.json"),
        lay_over=_lay_over,
    )
    try:
        return msgspec.convert(raw, HardwareProfile)
    except (msgspec.ValidationError, ValueError) as wrong:
        raise BadFile(f"{path}: {_named(raw, wrong)}") from None


def _read(path: Path) -> Any:
    try:
        return in_todays_words(read_json(path))
    except ValueError as wrong:
        raise wrong if isinstance(wrong, BadFile) else BadFile(f"{path}: {wrong}") from None


def _named(raw: Any, wrong: Exception) -> str:
    """The message with the name of the kernel or tensor type that it is about, which the path leaves out as [...]."""
    message = str(wrong)
    for holder, kind in ((raw, Kernel), (raw.get("gpu") if isinstance(raw, dict) else None, Roof)):
        key = "kernels" if kind is Kernel else "tensor"
        entries = holder.get(key) if isinstance(holder, dict) else None
        if f"{key}[...]" not in message or not isinstance(entries, dict):
            continue
        for name, entry in entries.items():
            try:
                msgspec.convert(entry, kind)
            except (msgspec.ValidationError, ValueError):
                return message.replace(f"{key}[...]", f"{key}.{name}")
    return message


def _lay_over(parent: Table, own: Table) -> Table:
    """`own` laid over `parent`, key by key at every level, down to a rate, a curve, counts or a kernel.

    These are replaced whole: half a rate with another's source and date would be a lie.
    """
    merged = {**parent, **own}
    for key, there in parent.items():
        mine = own.get(key)
        if isinstance(there, dict) and isinstance(mine, dict) and "source" not in there:
            merged[key] = {**there, **mine} if key == "kernels" else _lay_over(there, mine)
    return merged


def read_json(path: Path) -> Any:
    """The JSON value in `path`, read strictly: no NaN, no infinity, no half characters, no repeated key.

    Raises BadFile in one line.
    """
    content = read_whole(path)
    try:
        value = json.loads(content.decode(), object_pairs_hook=_refuse_repeats)
        _check_values(value, "$")
    except UnicodeDecodeError as wrong:
        raise BadFile(f"{path}: not UTF-8 text (byte {wrong.start})") from None
    except (ValueError, RecursionError) as wrong:
        raise BadFile(f"{path}: not valid JSON: {wrong}") from None
    return value


def _check_values(value: Any, where: str) -> None:
    """Raise ValueError where a number is not finite or a text could not be written again."""
    if isinstance(value, float) and not isfinite(value):
        raise ValueError(f"{where} is {value}, which is not a number that a data file may hold")
    if isinstance(value, str):
        _check_text(value, where)
    elif isinstance(value, dict):
        for key, part in value.items():
            _check_text(key, f"a key of {where}")
            _check_values(part, f"{where}.{key}")
    elif isinstance(value, list):
        for index, part in enumerate(value):
            _check_values(part, f"{where}[{index}]")


def _check_text(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as wrong:
        raise ValueError(f"{where} holds half of a surrogate pair (character {wrong.start})") from None


def _refuse_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {repeated!r} appears twice")
    return table
