"""The profile that a fit makes: the machine as it was, with the kernels that points set and what they stand on."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from calibrate.benchmarks.asking import Evidence
from calibrate.benchmarks.fitting import Fitted
from calibrate.benchmarks.parameters import FADED, HELD, Parameter, roof_of
from calibrate.build import LEAST_SPREAD, CannotCalibrate
from hwprofiles import HardwareProfile, profile_names
from hwprofiles.files import Table, is_path
from hwprofiles.names import several_of
from hwprofiles.profile import SCHEMA, Gpu, Kernel
from hwprofiles.rates import CLOSEST, Curve, Provenance
from hwprofiles.store import lay_over, own_document
from twin.cli.outputs import write_atomic


def write_profile(
    fitted: Fitted, found: Evidence, *, hw: str | None, name: str | None, output: Path
) -> HardwareProfile:
    """Write the machine with what was fitted to `output`, whole or not at all; CannotCalibrate where it would be none.

    The machine, as it was written.
    """
    kernels, name = fitted_kernels(fitted, found), name or output.stem
    try:
        gpu = fitted_gpu(fitted, found)
        made = replace(found.machine, name=name, gpu=gpu, kernels=found.machine.kernels | kernels)
    except (msgspec.ValidationError, ValueError) as wrong:
        raise CannotCalibrate(f"the benchmarks do not make a valid profile: {wrong}") from None
    document = document_of(kernels, roofs_of(fitted, gpu), found, hw=hw, name=name)
    write_atomic(output, json.dumps(document, indent=1, allow_nan=False) + "\n")
    return made


def document_of(kernels: Mapping[str, Kernel], gpu: Table, found: Evidence, *, hw: str | None, name: str) -> Table:
    """As a file holds it: over the shipped machine, or over the file that `hw` is; `gpu`: roofs that were fitted."""
    machine = found.machine
    entries = {key: _bare(msgspec.to_builtins(replace(kernel, machine=""))) for key, kernel in kernels.items()}
    files = ", ".join(path.name for path in found.paths)
    own: Table = {"name": name, "summary": f"{machine.summary}; rates of {len(kernels)} kernels fitted to {files}"}
    if hw is not None and is_path(hw) and machine.name not in profile_names():
        document = own_document(Path(hw))
        kept = {"gpu": lay_over(document.get("gpu", {}), gpu)} if gpu else {}
        return {**document, **own, **kept, "kernels": {**document.get("kernels", {}), **entries}}
    own |= {"gpu": gpu} if gpu else {}
    if machine.name in profile_names():
        return {"schema": SCHEMA, "extends": machine.name, **own, "kernels": entries}
    several = several_of(machine.name)
    if several is None:
        raise CannotCalibrate(f"{machine.name} is no shipped machine", hint="--hw takes one, or a profile")
    return {"schema": SCHEMA, "extends": several[1], **own, "gpu_count": several[0], "kernels": entries}


def fitted_gpu(fitted: Fitted, found: Evidence) -> Gpu:
    """The device with the roofs that points determine, each as a rate that was fitted."""
    gpu = fitted.kernels.gpu_at(fitted.parameters, fitted.values)
    for parameter, spread, ids in zip(fitted.parameters, fitted.spreads, fitted.points_of, strict=True):
        roof = roof_of(gpu, parameter.kernels[0]) if parameter.is_roof else None
        if roof is None:
            continue
        note = f"fitted: {roof.rate.note}"
        rate = _with(roof.rate, spread=min(1.0, max(LEAST_SPREAD, spread)), note=note, **_evidence(ids, found))
        changed = replace(roof, rate=rate)
        if parameter.kernels[0] == "vram":
            gpu = replace(gpu, vram_read=changed)
        else:
            gpu = replace(gpu, tensor=gpu.tensor | {parameter.kernels[0].partition(".")[2]: changed})
    return gpu


def roofs_of(fitted: Fitted, gpu: Gpu) -> Table:
    """Of a device, those that points determine, as a file holds them."""
    held: Table = {}
    for parameter in fitted.parameters:
        roof = roof_of(gpu, parameter.kernels[0]) if parameter.is_roof else None
        if roof is not None:
            entry = {"rate": _bare(msgspec.to_builtins(roof.rate))}
            if parameter.kernels[0] == "vram":
                held["vram_read"] = entry
            else:
                held.setdefault("tensor", {})[parameter.kernels[0].partition(".")[2]] = entry
    return held


def _evidence(ids: Sequence[str], found: Evidence) -> dict[str, Any]:
    """What a fitted rate says of itself."""
    n_of = {asked.point.id: asked.point.n for asked in found.asked}
    return {
        "n": sum(n_of[id_] for id_ in ids), "source": "fitted", "fitted_on": tuple(ids),
        "date": datetime.now(UTC).date().isoformat(),
    }  # fmt: skip


def fitted_kernels(fitted: Fitted, found: Evidence) -> dict[str, Kernel]:
    """Kernels with a parameter that points determine."""
    keys = dict.fromkeys(key for each in fitted.parameters if not each.is_roof for key in each.kernels)
    changed = fitted.kernels.changed(fitted.parameters, fitted.values)
    kernels = {}
    for key in keys:
        own = [
            (parameter, spread, ids)
            for parameter, spread, ids in zip(fitted.parameters, fitted.spreads, fitted.points_of, strict=True)
            if key in parameter.kernels
        ]
        points = tuple(dict.fromkeys(id_ for _, _, ids in own for id_ in ids))
        before = fitted.kernels.starts[key].spread
        kernels[key] = _known(changed[key], before, [each[:2] for each in own], _evidence(points, found))
    return kernels


def _known(kernel: Kernel, before: float, own: list[tuple[Parameter, float]], known: dict[str, Any]) -> Kernel:
    """With what the fit knows of its values, and where it knows nothing."""
    spreads = [min(1.0, max(LEAST_SPREAD, spread)) for _, spread in own]
    if kernel.efficiency is None:
        return replace(kernel, latency=_with(kernel.latency, spread=spreads[0], **known))
    curve = kernel.efficiency
    near = [_spread_near(place, own, spreads) for place in curve.at]
    where = ", ".join(parameter.where for parameter, _ in own)
    note = f"fitted around {where}; {HELD:g} times further and beyond {FADED:g} as it was: {curve.note}"
    return replace(kernel, efficiency=_with(curve, spread=min(1.0, before), spreads=tuple(near), note=note, **known))


def _spread_near(place: float, own: list[tuple[Parameter, float]], spreads: list[float]) -> float | None:
    """Of the parameters that hold there; None beyond all of them, and between two that are far apart."""
    reached = [
        spread
        for (parameter, _), spread in zip(own, spreads, strict=True)
        if parameter.places is not None
        and parameter.places[0] / HELD <= place * (1 + CLOSEST) and place <= parameter.places[1] * HELD * (1 + CLOSEST)
    ]  # fmt: skip
    return max(reached, default=None)


def _with(rate: Any, **known: Any) -> Any:
    told: Provenance | Curve = rate
    return replace(told, **known)


def _bare(table: Any) -> Any:
    """Without what is not said."""
    if not isinstance(table, dict):
        return table
    return {key: _bare(value) for key, value in table.items() if value is not None and value not in ("", [], ())}
