"""Fits the raw samples of a shipped machine once more: its records and its profile follow from them alone.

What no sample tells stays as it is shipped: links to other devices, kernels of engines that published figures set.

`python -m calibrate.refit h200` writes them where they lie; predictions say what a changed fit moves.
"""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from calibrate.build import Evidence, build, checked, instructions_roof
from calibrate.machine.description import Machine
from calibrate.probes import ProbeRecord
from hwprofiles.files import read_json
from hwprofiles.shipping import laid_over, ship
from hwprofiles.store import RECORDS, shipped_document

Records = Mapping[str, ProbeRecord]

OWN, LIBRARY, PROFILE = "calibration.json", "library_suite.json", "profile"
RATES = "*_rates.json"
"""Of chosen operations, as they came: what an earlier record sets stands; the first one's rate of instructions is the
machine's."""
DERIVED = ("median_s", "spread", "n")
"""What a record holds beside a sample's raw seconds."""


def refitted(machine: str, samples: Callable[[Records], Records] = dict) -> dict[str, dict[str, Any]]:
    """Every file of the machine that rates are in, by name; `samples` may change those of each record first."""
    own, library = (read_json(RECORDS / machine / name) for name in (OWN, LIBRARY))
    later = rate_records(machine)
    profile, record = build(
        machine=msgspec.convert(own["machine"], Machine), records=samples(probes(own)),
        name=own["name"], date=own["date"], command=own["command"],
    )  # fmt: skip
    evidence = [
        Evidence(machine=msgspec.convert(raw["machine"], Machine), records=samples(probes(raw)), date=raw["date"])
        for raw in later.values()
    ]
    profile["gpu"] |= instructions_roof(evidence[0])
    bare = checked(profile | {"kernels": {}})
    beside = Evidence(machine=evidence[0].machine, records=samples(probes(library)), date=own["date"])
    of_library, parts = beside.kernels(bare)
    made = {OWN: own | record | {"machine": own["machine"]}}
    made[LIBRARY] = library | {"kernels": of_library, "fitted": parts}
    chosen: dict[str, Any] = {}
    for (name, raw), taken in zip(later.items(), evidence, strict=True):
        kernels, residuals = taken.kernels(bare)
        made[name] = raw | {"kernels": kernels, "fitted": residuals, "gpu": instructions_roof(taken)}
        chosen |= {key: kernel for key, kernel in kernels.items() if key not in chosen}
    profile["kernels"] |= of_library | chosen
    checked(profile)
    made[PROFILE] = laid_over(shipped_document(machine), profile)
    as_data: dict[str, dict[str, Any]] = json.loads(json.dumps(made, allow_nan=False))
    return as_data


def rate_records(machine: str) -> dict[str, dict[str, Any]]:
    """Records of chosen operations by the names of their files, the earliest first."""
    found = {path.name: read_json(path) for path in (RECORDS / machine).glob(RATES)}
    return dict(sorted(found.items(), key=lambda record: (record[1]["date"], record[0])))


def probes(record: dict[str, Any]) -> dict[str, ProbeRecord]:
    """The raw samples of a record."""
    found = {}
    for name, probe in record["probes"].items():
        samples = [{key: value for key, value in sample.items() if key not in DERIVED} for sample in probe["samples"]]
        found[name] = msgspec.convert(probe | {"samples": samples}, ProbeRecord)
    return found


def main(machine: str) -> None:
    """Write every file anew."""
    for name, document in refitted(machine).items():
        if name == PROFILE:
            ship(document)
        else:
            Path(RECORDS / machine / name).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
