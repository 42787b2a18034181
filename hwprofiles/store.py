"""Finding machines, by a shipped name or the path of a file, and joining them with what engines' kernels reach there.

Shipped: `machines/<name>.json` is what a machine is, `kernels/<engine>.json` what share of a roof each kernel of that
engine reaches on the machines where it was measured, and `records/` the raw samples and figures behind both. A file of
one's own, as `twin calibrate -o` writes it, holds a machine with its kernels. What nobody measured is a short file: a
`datasheet` (`hwprofiles/sheets.py`) in place of device and host.
"""

from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from hwprofiles.errors import BadFile, NotShipped, UnknownName
from hwprofiles.files import Table, extended, is_path, read_json
from hwprofiles.names import known_as, several_of
from hwprofiles.profile import HardwareProfile, Kernel, Roof, mixed
from hwprofiles.spelling import is_accelerator, match, nearest, suggestions

FOLDER = Path(__file__).parent
MACHINES, KERNELS, RECORDS = FOLDER / "machines", FOLDER / "kernels", FOLDER / "records"

SHEET = "datasheet"
"""Key of a short file. A roof has one of that name, too, whose key `rate` stands beside it."""
KERNELS_SCHEMA = "twin.kernels/1"

OPERATIONS = {"expand": "dequantise", "merge": "combine"}
"""First words of kernels' names in profiles that `twin calibrate` of 0.1.0 wrote, and today's."""
KERNEL_KEYS = {"merging": "combine"}
"""The same of keys of a kernel's entry."""

_INSTEAD = (
    "--hw reads JSON of schema twin.hardware/1: twin calibrate -o FILE writes it, twin profiles NAME --json shows it"
)


class EngineKernels(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A file of `kernels/`: kernels of one engine by the machine they were measured on, raw until asked for."""

    schema: str
    engine: str
    machines: dict[str, msgspec.Raw]


def profile_names() -> list[str]:
    """Names of the shipped machines."""
    return sorted(path.stem for path in MACHINES.glob("*.json"))


def load_profile(name: str) -> HardwareProfile:
    """The machine called `name` (case and separators aside), several of it, or one from a file.

    Raises UnknownName or BadFile.
    """
    names = profile_names()
    known = match(name, names)
    if known is not None:
        return _shipped(known)
    if is_path(name):
        from hwprofiles.recognition import PROFILE, recognised  # noqa: PLC0415 - a shipped machine needs none

        path = Path(name)
        with recognised(path, PROFILE, instead=_INSTEAD):
            return _profile(own_document(path), path)
    if "+" in name:
        return _mixed(name)
    usual = known_as(name, names)
    if usual is not None:
        return _shipped(usual)
    if (several := several_of(name)) is not None and (one := known_as(several[1], names)) is not None:
        return _several(name, several[0], _shipped(one))
    if is_accelerator(name) and not suggestions(name, names):
        near = nearest(name, names)
        other = f"; the nearest, {near}, is another machine" if near else ""
        measure = "twin calibrate measures yours, --hw FILE takes a profile or a short one from its data sheet"
        raise NotShipped("machine", name, f"twin profiles lists what is{other}; {measure}")
    raise UnknownName("machine", name, names, listed="twin profiles lists them")


def _mixed(name: str) -> HardwareProfile:
    """Several machines' devices in one, such as rtx4070+rtx3060; NotShipped where they do not go together."""
    names = [part.strip() for part in name.split("+")]
    if not all(names):
        raise NotShipped("machine", name, "'+' stands between two machines, such as rtx4070+rtx3060")
    parts = [load_profile(part) for part in names]
    try:
        return mixed(parts)
    except ValueError as wrong:
        raise NotShipped("machine", name, f"its devices do not go together: {wrong}") from None


def _several(name: str, count: int, one: HardwareProfile) -> HardwareProfile:
    """So many of one; NotShipped where its device cannot be repeated."""
    try:
        return one.repeated(count)
    except (ValueError, msgspec.ValidationError) as wrong:
        raise NotShipped("machine", name, f"{one.name} cannot be repeated: {wrong}") from None


@cache
def _by_engine() -> tuple[EngineKernels, ...]:
    """The files of kernels, read once for a machine and what it extends."""
    files = sorted(KERNELS.glob("*.json"))
    return tuple(msgspec.json.decode(path.read_bytes(), type=EngineKernels) for path in files)


def shipped_document(name: str) -> Table:
    """A shipped machine as one file of one's own would hold it: `extends` as it is, kernels of all engines joined."""
    machine: Table = msgspec.json.decode((MACHINES / f"{name}.json").read_bytes())
    kernels: Table = {}
    for engine in _by_engine():
        measured = engine.machines.get(name)
        if measured is not None:
            kernels |= msgspec.json.decode(measured)
    return {**machine, "kernels": kernels} if kernels else machine


@cache
def shipped_kernels() -> dict[str, dict[str, Kernel]]:
    """Shipped kernels of all engines by the machine that they were measured on."""
    found: dict[str, dict[str, Kernel]] = {}
    for engine in _by_engine():
        for machine, raw in engine.machines.items():
            kernels = msgspec.json.decode(raw, type=dict[str, Kernel])
            found.setdefault(machine, {}).update(kernels)
    return found


@cache
def _shipped(name: str) -> HardwareProfile:
    return _profile(shipped_document(name), MACHINES / f"{name}.json")


def _profile(raw: Any, path: Path) -> HardwareProfile:
    """`raw`, read from `path`, with what it extends. Raises BadFile."""
    shelf = "machine", profile_names(), lambda name: _measured_on(name, shipped_document(name)), lay_over
    raw = extended(raw, path, shelf)
    if isinstance(raw, dict):
        raw = _measured_on(raw.get("name"), raw)
    try:
        return msgspec.convert(_filled(raw), HardwareProfile)
    except (msgspec.ValidationError, ValueError) as wrong:
        raise BadFile(f"{path}: {_named(raw, wrong)}") from None


def _filled(raw: Any) -> Any:
    """A short file with what its sheet stands for; what it says of device and host itself lies over that."""
    if not isinstance(raw, dict) or SHEET not in raw:
        return raw
    from hwprofiles.sheets import expanded  # noqa: PLC0415 - a measured machine has none

    return lay_over(expanded(raw), {key: value for key, value in raw.items() if key != SHEET})


def _measured_on(machine: Any, document: Table) -> Table:
    """The same, with that machine in every kernel that names none."""
    kernels = document.get("kernels")
    if not isinstance(kernels, dict) or not isinstance(machine, str):
        return document
    told = {key: {"machine": machine, **each} if isinstance(each, dict) else each for key, each in kernels.items()}
    return {**document, "kernels": told}


def _named(raw: Any, wrong: Exception) -> str:
    """The message with the name of the kernel or tensor type that it is about, which the path leaves out as [...]."""
    message = str(wrong)
    gpu = raw.get("gpu") if isinstance(raw, dict) else None
    for holder, key, kind in ((raw, "kernels", Kernel), (gpu, "tensor", Roof)):
        entries = holder.get(key) if isinstance(holder, dict) else None
        if f"{key}[...]" not in message or not isinstance(entries, dict):
            continue
        for name, entry in entries.items():
            try:
                msgspec.convert(entry, kind)
            except (msgspec.ValidationError, ValueError):
                return message.replace(f"{key}[...]", f"{key}.{name}")
    return message


def lay_over(parent: Table, own: Table) -> Table:
    """`own` over `parent`, key by key at every level; what has a source of its own is replaced whole.

    A sheet over a machine that is no short file replaces its device and host.
    """
    if SHEET in own and SHEET not in parent:
        parent = {key: value for key, value in parent.items() if key not in ("gpu", "host")}
    laid = {**parent, **own}
    for key, there in parent.items():
        mine = own.get(key)
        if isinstance(there, dict) and isinstance(mine, dict) and "source" not in there:
            laid[key] = {**there, **mine} if key == "kernels" else lay_over(there, mine)
    return laid


def own_document(path: Path) -> Any:
    """A profile as it lies in a file, its kernels in today's words. BadFile where one is there in both."""
    raw = read_json(path)
    kernels = raw.get("kernels") if isinstance(raw, dict) else None
    if not isinstance(kernels, dict):
        return raw
    today = _renamed(kernels, OPERATIONS, f"{path}: $.kernels", "kernel").items()
    told = {name: _renamed(entry, KERNEL_KEYS, f"{path}: $.kernels.{name}", "rate") for name, entry in today}
    return {**raw, "kernels": told}


def _renamed(table: Any, words: dict[str, str], place: str, what: str) -> Any:
    """A table with other first words of its keys; what is no table stays, to be refused by its schema."""
    if not isinstance(table, dict):
        return table
    made: dict[str, Any] = {}
    for key, value in table.items():
        word, slash, rest = key.partition("/")
        today = f"{words.get(word, word)}{slash}{rest}"
        if today != key and today in table:
            raise BadFile(f"{place}: {key} and {today} are two names of one {what}")
        made[today] = value
    return made
