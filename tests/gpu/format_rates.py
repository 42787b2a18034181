"""Rates of attention over every cache format on a real GPU: only their probes and their fits, over a known profile.

Run as `python tests/gpu/format_rates.py [report.json] [--quick] [--into profile.json]`. Roofs are those of `--hw`, so
that nothing else is measured; `--into` puts the kernels and the rate of instructions into a copy of that profile.
`--again report.json` fits the samples of an earlier run once more and needs no device.
"""

import argparse
import json
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).parents[2]))

from calibrate.build import Evidence, checked, instructions_roof
from calibrate.format_fits import format_rates
from calibrate.probes import CannotRun, Context, Machine, ProbeRecord
from calibrate.probes.machine import describe
from hwprofiles.profile import HardwareProfile, Roof
from hwprofiles.store import DATA, read_json

DTYPES = {"torch.float16": "fp16", "torch.float32": "fp32", "torch.bfloat16": "bf16"}


def measured(device: str, *, quick: bool) -> tuple[Any, dict[str, ProbeRecord]]:
    """(machine, a record a probe). A probe that fails is told and left out: the others go on."""
    from calibrate.probes import formats, instructions
    from realkernels.backend import open_backend

    records = {}
    with tempfile.TemporaryDirectory() as folder:
        backend = open_backend(device, folder=folder)
        machine = describe(str(backend.device), dtype=DTYPES[str(backend.dtype)])
        for probe in (*instructions.PROBES, *formats.PROBES):
            reason = probe.supported(machine)
            context = Context(
                machine=machine, backend=backend, folder=Path(folder), quick=quick,
                estimate_s=2 * probe.estimate_s(quick=quick),
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


def roofed(raw: dict[str, Any], evidence: Evidence) -> HardwareProfile:
    """The profile without kernels, with the rate of instructions that was just measured."""
    profile: HardwareProfile = msgspec.convert(raw, HardwareProfile)
    found = instructions_roof(evidence)
    gpu = replace(profile.gpu, instructions=msgspec.convert(found["instructions"], Roof)) if found else profile.gpu
    return replace(profile, gpu=gpu, kernels={})


def tell(records: dict[str, ProbeRecord], kernels: dict[str, Any], fitted: dict[str, Any]) -> None:
    """Every sample with its residual, every rate."""
    for key, rows in fitted.items():
        if key.endswith("#left_out"):
            print("  left-out error: " + ", ".join(f"{name} {100 * error:.1f} %" for name, error in rows.items()))
            continue
        print(f"\n{key}")
        for row in rows:
            at = {
                name: row["at"][name] for name in ("ctx_tokens", "batch", "query_tokens", "tokens") if name in row["at"]
            }
            left = f", left out {100 * row['left_out']:+.1f} %" if "left_out" in row else ""
            print(f"  {at}: {1e6 * row['measured_s']:.1f} us, fit {100 * row['residual']:+.1f} %{left}")
    print()
    for key, kernel in kernels.items():
        curve = kernel["efficiency"]
        points = ", ".join(f"{at:g}: {share:.3f}" for at, share in zip(curve["at"], curve["efficiency"], strict=True))
        parts = [
            f"{1e6 * kernel[name]['value']:.2f} us ({name})" for name in ("latency", "latency_each") if name in kernel
        ]
        parts += [f"{kernel['decoding']['value']:.2f} operations an element"] if "decoding" in kernel else []
        print(f"{key}: {', '.join(parts)}; {points} (spread {curve['spread']:.3f}; {curve['note']})")
    for name in ("instructions",):
        for sample in records[name].samples:
            print(f"{name} {dict(sample.at)}: {sample.flops / sample.median_s / 1e12:.2f} T op/s")
    print(f"\nall probes: {sum(record.took_s for record in records.values()):.1f} s")


def main() -> None:
    """Measure, fit, print, and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", nargs="?", type=Path, help="where to write samples and rates as JSON")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--hw", default="h200", help="the shipped profile whose roofs the efficiencies are shares of")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--again", type=Path, help="fit the samples of this report, measure nothing")
    parser.add_argument("--into", type=Path, help="where to write that profile with the new rates")
    asked = parser.parse_args()
    raw = read_json(DATA / asked.hw / "profile.json")
    if asked.again is None:
        machine, records = measured(asked.device, quick=asked.quick)
        date = datetime.now(UTC).date().isoformat()
    else:
        earlier = read_json(asked.again)
        machine, date = msgspec.convert(earlier["machine"], Machine), earlier["date"]
        records = msgspec.convert(earlier["probes"], dict[str, ProbeRecord])
    evidence = Evidence(machine=machine, records=records, date=date)
    kernels, fitted = format_rates(records, roofed(raw, evidence), evidence.provenance)
    tell(records, kernels, fitted)
    if asked.report is not None:
        made = {
            "machine": msgspec.to_builtins(machine) | {"device_id": ""}, "date": evidence.date, "kernels": kernels,
            "gpu": instructions_roof(evidence), "fitted": fitted, "probes": msgspec.to_builtins(records),
        }  # fmt: skip
        asked.report.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    if asked.into is not None:
        raw["gpu"] |= instructions_roof(evidence)
        raw["kernels"] |= kernels
        checked(raw)
        asked.into.write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
