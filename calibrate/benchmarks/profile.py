"""The profile that a fit makes: the machine as it was, with the kernels that points set and what they stand on."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from calibrate.benchmarks.asking import Evidence
from calibrate.benchmarks.fitting import Fitted
from calibrate.benchmarks.parameters import FADED, HELD, Parameter
from calibrate.build import LEAST_SPREAD, CannotCalibrate
from hwprofiles import HardwareProfile, profile_names
from hwprofiles.files import Table, is_path
from hwprofiles.names import several_of
from hwprofiles.profile import SCHEMA, Kernel
from hwprofiles.rates import Curve, Provenance
from hwprofiles.store import own_document
from twin.cli.outputs import write_atomic


def write_profile(
    fitted: Fitted, found: Evidence, *, hw: str | None, name: str | None, output: Path
) -> HardwareProfile:
    """Write the machine with what was fitted to `output`, whole or not at all; CannotCalibrate where it would be none.

    The machine, as it was written.
    """
    kernels, name = fitted_kernels(fitted, found), name or output.stem
    try:
        made = replace(found.machine, name=name, kernels=found.machine.kernels | kernels)
    except (msgspec.ValidationError, ValueError) as wrong:
        raise CannotCalibrate(f"the benchmarks do not make a valid profile: {wrong}") from None
    document = document_of(kernels, found, hw=hw, name=name)
    write_atomic(output, json.dumps(document, indent=1, allow_nan=False) + "\n")
    return made


def document_of(kernels: Mapping[str, Kernel], found: Evidence, *, hw: str | None, name: str) -> Table:
    """As a file holds it: over the shipped machine, or over the file that `hw` is."""
    machine = found.machine
    entries = {key: _bare(msgspec.to_builtins(replace(kernel, machine=""))) for key, kernel in kernels.items()}
    files = ", ".join(path.name for path in found.paths)
    own = {"name": name, "summary": f"{machine.summary}; rates of {len(kernels)} kernels fitted to {files}"}
    if hw is not None and is_path(hw) and machine.name not in profile_names():
        document = own_document(Path(hw))
        return {**document, **own, "kernels": {**document.get("kernels", {}), **entries}}
    if machine.name in profile_names():
        return {"schema": SCHEMA, "extends": machine.name, **own, "kernels": entries}
    several = several_of(machine.name)
    if several is None:
        raise CannotCalibrate(f"{machine.name} is no shipped machine", hint="--hw takes one, or a profile")
    return {"schema": SCHEMA, "extends": several[1], **own, "gpu_count": several[0], "kernels": entries}


def fitted_kernels(fitted: Fitted, found: Evidence) -> dict[str, Kernel]:
    """Kernels with a parameter that points determine."""
    keys = dict.fromkeys(parameter.kernel for parameter in fitted.parameters)
    changed = fitted.kernels.changed(fitted.parameters, fitted.values)
    n_of = {asked.point.id: asked.point.n for asked in found.asked}
    kernels = {}
    for key in keys:
        own = [
            (parameter, spread, ids)
            for parameter, spread, ids in zip(fitted.parameters, fitted.spreads, fitted.points_of, strict=True)
            if parameter.kernel == key
        ]
        points = tuple(dict.fromkeys(id_ for _, _, ids in own for id_ in ids))
        known = {
            "n": sum(n_of[id_] for id_ in points), "source": "fitted", "fitted_on": points,
            "date": datetime.now(UTC).date().isoformat(),
        }  # fmt: skip
        kernels[key] = _known(changed[key], fitted.kernels.starts[key].spread, [each[:2] for each in own], known)
    return kernels


def _known(kernel: Kernel, before: float, own: list[tuple[Parameter, float]], known: dict[str, Any]) -> Kernel:
    """With what the fit knows of its values, and where it knows nothing."""
    spreads = [min(1.0, max(LEAST_SPREAD, spread)) for _, spread in own]
    if kernel.efficiency is None:
        return replace(kernel, latency=_with(kernel.latency, spread=spreads[0], **known))
    curve = kernel.efficiency
    near = [_spread_near(place, own, spreads, before) for place in curve.at]
    where = ", ".join(str(parameter).rpartition(" at ")[2] for parameter, _ in own)
    note = f"fitted around {where}; {HELD:g} times further and beyond {FADED:g} as it was: {curve.note}"
    return replace(kernel, efficiency=_with(curve, spread=max(near), spreads=tuple(near), note=note, **known))


def _spread_near(
    place: float, own: list[tuple[Parameter, float]], spreads: list[float], before: float
) -> float:
    reached = [
        spread
        for (parameter, _), spread in zip(own, spreads, strict=True)
        if parameter.places is not None
        and parameter.places[0] / HELD <= place * (1 + 1e-6)
        and place <= parameter.places[1] * HELD * (1 + 1e-6)
    ]
    return max(reached) if reached else min(1.0, before)


def _with(rate: Any, **known: Any) -> Any:
    told: Provenance | Curve = rate
    return replace(told, **known)


def _bare(table: Any) -> Any:
    """Without what is not said."""
    if not isinstance(table, dict):
        return table
    return {key: _bare(value) for key, value in table.items() if value not in (None, "", [], ())}
