"""Rates of every cache format on a real GPU: only their probes and their fits, over a known profile.

Those of decode, append, prefill and gathers of records from host memory. Run as
`python tests/gpu/format_rates.py [report.json] [--quick] [--into profile.json]`. Roofs are those of `--hw`, so that
nothing else is measured; `--into` puts the kernels and the rate of instructions into a copy of that profile.
`--again report.json` fits the samples of an earlier run once more and needs no device.
"""

import argparse
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).parents[2]))

from calibrate.build import Evidence, checked, instructions_roof
from calibrate.probes import Machine, ProbeRecord
from calibrate.refit import format_kernels
from hwprofiles.files import read_json
from hwprofiles.profile import HardwareProfile, Roof
from hwprofiles.store import shipped_document
from tests.gpu.probing import probed, reported


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
        parts = [f"{1e6 * kernel['latency']['value']:.2f} us"] if "latency" in kernel else []
        parts += [f"combine {kernel['combine']['value']:.2f}"] if "combine" in kernel else []
        if "operations" in kernel:
            counts = kernel["operations"]
            told = (f"{rows:g}: {count:.2f}" for rows, count in zip(counts["at"], counts["counts"], strict=True))
            parts.append(f"operations an element by rows {', '.join(told)}")
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
    raw = shipped_document(asked.hw)
    if asked.again is None:
        from calibrate.machine import launches  # need torch
        from calibrate.probes import format_prefill, formats
        from calibrate.probes import records as of_records

        parts = (launches, formats, format_prefill, of_records)
        probes = [probe for part in parts for probe in part.PROBES]
        machine, records = probed(probes, asked.device, quick=asked.quick)
        date = datetime.now(UTC).date().isoformat()
    else:
        earlier = read_json(asked.again)
        machine, date = msgspec.convert(earlier["machine"], Machine), earlier["date"]
        records = msgspec.convert(earlier["probes"], dict[str, ProbeRecord])
    evidence = Evidence(machine=machine, records=records, date=date)
    kernels, fitted = format_kernels(evidence, roofed(raw, evidence))
    tell(records, kernels, fitted)
    if asked.report is not None:
        made = reported(machine, records) | {
            "date": evidence.date, "kernels": kernels, "gpu": instructions_roof(evidence), "fitted": fitted
        }  # fmt: skip
        asked.report.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    if asked.into is not None:
        raw["gpu"] |= instructions_roof(evidence)
        raw["kernels"] |= kernels
        checked(raw)
        asked.into.write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
