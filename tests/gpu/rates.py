"""Rates of chosen operations on a real GPU: only their probes and their fits, over a known profile.

Run as `python tests/gpu/rates.py [report.json] [--only decode_format,append_format] [--quick] [--into profile.json]`.
Roofs are those of `--hw`, so that nothing else is measured; `--into` puts the kernels and the rate of instructions into
a copy of that profile. `--held-out` measures the held-out cases of these operations as well and holds the new rates
against them; `--measurements` puts their rows into a machine's measurements. `--again report.json` fits the samples of
an earlier run once more and needs no device.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).parents[2]))

from calibrate.build import Evidence, checked, instructions_roof
from calibrate.live import compare, provenance
from calibrate.machine.description import Machine, describe
from calibrate.measure import measure, measured_in_rounds
from calibrate.measurements import (
    SCHEMA,
    LeftOutRow,
    MeasuredRow,
    Measurements,
    merged,
    read_measurements,
    to_text,
)  # fmt: skip
from calibrate.operations.operation import KV_DTYPE
from calibrate.operations.table import BY_NAME, GROUPS, OPERATIONS, held_out_cases
from calibrate.probes import CannotRun, Context, Probe, ProbeRecord, all_probes
from hwprofiles.files import is_path, read_json
from hwprofiles.profile import HardwareProfile, Roof
from hwprofiles.store import shipped_document

BEFORE = ("instructions", "compiled_kernels")
"""Probes that others over formats rest on, or that spare them waiting for compilers."""

PATIENCE = 4
"""Times the estimate that a probe may take before it leaves points out: nothing waits behind these."""


def probed(probes: Iterable[Probe], device: str, *, quick: bool) -> tuple[Machine, dict[str, ProbeRecord]]:
    """(machine, a record a probe), told as it goes. A probe that fails is told and left out: the others go on."""
    from realkernels.device import open_device  # needs torch

    records = {}
    with tempfile.TemporaryDirectory() as folder:
        backend = open_device(device)
        machine = describe(str(backend.device), dtype=KV_DTYPE)
        for probe in probes:
            reason = probe.supported(machine)
            context = Context(
                machine=machine, backend=backend, folder=Path(folder), quick=quick,
                estimate_s=PATIENCE * probe.estimate_s(quick=quick),
            )  # fmt: skip
            begin, samples = time.monotonic(), []
            try:
                samples = probe.run(context) if not reason else []
            except (CannotRun, RuntimeError) as missing:
                reason = f"{type(missing).__name__}: {missing}"
            took = time.monotonic() - begin
            records[probe.name] = ProbeRecord(
                samples=tuple(samples), skipped=reason, left_out=context.left_out, took_s=took
            )
            print(
                f"{probe.name}: {took:.1f} s, {len(samples)} points, {context.left_out} left out {reason}", flush=True
            )
    return machine, records


def among(probe: str, names: Iterable[str]) -> bool:
    """Whether a probe is one of these, or of one of these operations."""
    return any(f"{probe}.".startswith(f"{name}.") for name in names)


def wanted(names: Iterable[str]) -> list[Probe]:
    """Those of `names`, and what must come before them."""
    probes = all_probes()
    operations = [BY_NAME.get(probe.name.partition(".")[0]) for probe in probes if among(probe.name, names)]
    before = BEFORE if any(one is not None and one.timed.over == "format" for one in operations) else ()
    return [probe for probe in probes if among(probe.name, (*names, *before))]


def held_out(names: Iterable[str], device: str, *, quick: bool, hw: str) -> Measurements:
    """Every held-out case of `names`, measured as `twin validate --device` does."""
    from realkernels.device import open_device  # needs torch

    backend = open_device(device)
    machine = describe(str(backend.device), dtype=KV_DTYPE)
    rows: list[MeasuredRow] = []
    left: list[LeftOutRow] = []
    made = {}
    for group in GROUPS:
        cases = held_out_cases(group, cuda=machine.is_cuda, quick=quick)
        own = [case for case in cases if among(case.row.probe(case.at), names)]
        run = partial(measure, own, backend, machine, group=group, progress=lambda case: print(case.id, flush=True))
        for outcome in measured_in_rounds(run, backend.rounds) if own else ():
            (left if isinstance(outcome, LeftOutRow) else rows).append(outcome)  # type: ignore[arg-type]
        if own:
            made[group] = provenance(machine, f"python tests/gpu/rates.py --only {','.join(names)} --held-out")
    return Measurements(schema=SCHEMA, machine=hw, kv_dtype=KV_DTYPE, made=made, rows=tuple(rows), left_out=tuple(left))


def tell_held_out(measurements: Measurements, profile: HardwareProfile) -> None:
    """Each case against its prediction, or why there is none."""
    for row in measurements.rows:
        lacking = row.case.missing_rate(profile, measurements.kv_dtype)
        if lacking:
            print(f"{row.case.id}: {lacking}")
            continue
        held = compare(row, profile, kv_dtype=measurements.kv_dtype)
        told = (
            f"measured {1e6 * held.measured:.1f} us, spread {row.spread:.2f}, predicted {1e6 * held.predicted:.1f} us"
        )
        naive = f"bytes alone {100 * held.naive_error:+.0f} %" if held.naive_error is not None else ""
        print(f"{row.case.id}: {told}, {100 * held.error:+.1f} % of {100 * (held.tolerance or 0):.0f} % {naive}")
    for left in measurements.left_out:
        print(f"{left.case.id}: left out: {left.reason}")


def put_into(path: Path, new: Measurements) -> None:
    """Rows into a machine's measurements, those of other operations in the same group left alone."""
    old = read_measurements(path)
    names = ", ".join(dict.fromkeys(row.case.operation for row in new.rows))
    made = {}
    for group, facts in new.made.items():
        told = ", ".join(f"{name} {facts[name]}" for name in ("date", "torch", "commit", "code"))
        made[group] = old.made.get(group, facts) | {f"of {names}": told}
    path.write_text(to_text(merged(old, replace(new, machine=old.machine, made=made))), encoding="utf-8")


def reported(machine: Machine, records: Mapping[str, ProbeRecord]) -> dict[str, Any]:
    """Machine and samples as plain data; the device's own number is nobody's business."""
    return {"machine": msgspec.to_builtins(machine) | {"device_id": ""}, "probes": msgspec.to_builtins(dict(records))}


def roofed(raw: dict[str, Any], evidence: Evidence) -> HardwareProfile:
    """The profile without kernels, with the rate of instructions that was just measured."""
    profile: HardwareProfile = msgspec.convert(raw, HardwareProfile)
    found = instructions_roof(evidence)
    gpu = replace(profile.gpu, instructions=msgspec.convert(found["instructions"], Roof)) if found else profile.gpu
    return replace(profile, gpu=gpu, kernels={})


def tell(records: Mapping[str, ProbeRecord], kernels: dict[str, Any], fitted: dict[str, Any]) -> None:
    """Every sample with its residual, every rate."""
    for key, rows in fitted.items():
        print(f"\n{key}")
        for row in rows if isinstance(rows, list) else ():
            left = f", left out {100 * row['left_out']:+.1f} %" if "left_out" in row else ""
            parts = " ".join(f"{part} {1e6 * seconds:.1f}" for part, seconds in row.get("parts_s", {}).items())
            told = f"{1e6 * row['measured_s']:.1f} us, fit {100 * row['residual']:+.1f} %{left} {parts}"
            print(f"  {dict(row['at'])}: {told}")
        if isinstance(rows, dict):
            print("  " + ", ".join(f"{name} {value:.3f}" for name, value in rows.items()))
    print()
    for key, kernel in kernels.items():
        told = [f"{name} {rate['value']:.3g} {rate['unit']}" for name, rate in kernel.items() if "value" in rate]
        for name, values in (("efficiency", "efficiency"), ("operations", "counts")):
            if name in kernel:
                pairs = zip(kernel[name]["at"], kernel[name][values], strict=True)
                told.append(f"{name} " + ", ".join(f"{at:g}: {value:.3f}" for at, value in pairs))
        print(f"{key}: {'; '.join(told)}")
    print(f"\nall probes: {sum(record.took_s for record in records.values()):.1f} s")


def main() -> None:
    """Measure, fit, print, and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", nargs="?", type=Path, help="where to write samples and rates as JSON")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--hw", default="h200", help="the shipped profile whose roofs the efficiencies are shares of")
    parser.add_argument(
        "--only", default=",".join(one.name for one in OPERATIONS if one.fits), help="operations, or their probes"
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--again", type=Path, help="fit the samples of this report, measure nothing")
    parser.add_argument("--into", type=Path, help="where to write that profile with the new rates")
    parser.add_argument("--held-out", action="store_true", help="measure the held-out cases of --only, too")
    parser.add_argument("--measurements", type=Path, help="measurements of a machine that held-out rows are put into")
    asked = parser.parse_args()
    raw = read_json(Path(asked.hw)) if is_path(asked.hw) else shipped_document(asked.hw)
    rows: Measurements | None = None
    if asked.again is None:
        names = asked.only.split(",")
        machine, records = probed(wanted(names), asked.device, quick=asked.quick)
        date = datetime.now(UTC).date().isoformat()
        if asked.held_out:
            rows = held_out(names, asked.device, quick=asked.quick, hw=raw["name"])
    else:
        earlier = read_json(asked.again)
        machine, date = msgspec.convert(earlier["machine"], Machine), earlier["date"]
        records = msgspec.convert(earlier["probes"], dict[str, ProbeRecord])
        rows = msgspec.convert(earlier["held_out"], Measurements) if "held_out" in earlier else None
    evidence = Evidence(machine=machine, records=records, date=date)
    kernels, fitted = evidence.kernels(roofed(raw, evidence))
    tell(records, kernels, fitted)
    if rows is not None:
        tell_held_out(rows, checked(raw | {"kernels": raw["kernels"] | kernels}))
        if asked.measurements is not None:
            put_into(asked.measurements, rows)
    if asked.report is not None:
        made = reported(machine, records) | {
            "date": evidence.date, "kernels": kernels, "gpu": instructions_roof(evidence), "fitted": fitted
        }  # fmt: skip
        if rows is not None and asked.measurements is None:
            made["held_out"] = rows
        asked.report.write_text(json.dumps(msgspec.to_builtins(made), indent=1) + "\n", encoding="utf-8")
    if asked.into is not None:
        raw["gpu"] |= instructions_roof(evidence)
        raw["kernels"] |= kernels
        checked(raw)
        asked.into.write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
