"""Shipping a machine: a profile, as `twin calibrate -o` writes it, split into what it is and its kernels by engine.

`python -m hwprofiles.shipping me.json` writes `machines/<name>.json` and the machine's part of `kernels/<engine>.json`.
"""

import json
import sys
from pathlib import Path

import msgspec

from hwprofiles.files import Table, read_json
from hwprofiles.profile import Kernel
from hwprofiles.store import (
    KERNELS,
    KERNELS_SCHEMA,
    MACHINES,
    SHEET,
    load_profile,
    own_document,
    profile_names,
    shipped_document,
)

ENGINES = {"twin_inline": "twin", "flash_attention": "library"}
"""Whose kernels an implementation's are that is not called after its engine, where `twin calibrate` measured them."""


def ship(profile: Table, *, machines: Path = MACHINES, kernels: Path = KERNELS) -> None:
    """Write the files of a machine; a kernel that is shipped already stays with its engine, one that is gone goes."""
    name = profile["name"]
    _write(machines / f"{name}.json", {key: value for key, value in profile.items() if key != "kernels"})
    files: dict[str, Table] = {path.stem: read_json(path) for path in sorted(kernels.glob("*.json"))}
    earlier = {key: engine for engine, file in files.items() for key in file["machines"].pop(name, {})}
    for key, entry in profile.get("kernels", {}).items():
        implementation = key.split("/")[1]
        engine = earlier.get(key, ENGINES.get(implementation, implementation))
        file = files.setdefault(engine, {"schema": KERNELS_SCHEMA, "engine": engine, "machines": {}})
        file["machines"].setdefault(name, {})[key] = entry
    for engine, file in files.items():
        _write(kernels / f"{engine}.json", {**file, "machines": dict(sorted(file["machines"].items()))})


def laid_over(shipped: Table, measured: Table) -> Table:
    """A machine as measured anew, with what no sample tells of: links to other devices, kernels that figures set."""
    kernels = shipped.get("kernels", {})
    known = msgspec.convert(kernels, dict[str, Kernel])
    published = {key: raw for key, raw in kernels.items() if known[key].is_fitted}
    kept = {key: value for key, value in shipped.items() if key not in (SHEET, "extends")}
    gpu = kept.get("gpu", {}) | measured.get("gpu", {})
    return kept | measured | {"gpu": gpu, "kernels": published | measured.get("kernels", {})}


def _write(path: Path, document: Table) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def main(path: str) -> None:
    """Ship the profile in `path`, which must be one. Raises BadFile."""
    load_profile(path)
    profile = own_document(Path(path))
    name = profile["name"]
    ship(laid_over(shipped_document(name), profile) if name in profile_names() else profile)


if __name__ == "__main__":
    main(*sys.argv[1:])
