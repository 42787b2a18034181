"""The library kernels of a dense model on a real device: only their probes, their fits, and whole layers beside sums.

Run as `python tests/gpu/library_suite.py [report.json]`. Roofs are those of `--hw`, so that nothing else is measured.
"""

import argparse
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).parents[2]))

from calibrate.build import Evidence
from calibrate.library_fits import library_rates
from calibrate.probes import ProbeRecord
from calibrate.probes.library import PROBES
from hwprofiles import load_profile
from tests.gpu.probing import probed, reported


def tell(records: dict[str, ProbeRecord], kernels: dict[str, Any], fitted: dict[str, Any]) -> None:
    """Every sample with its residual, every rate, every whole layer with its parts."""
    for key, rows in fitted.items():
        print(f"\n{key}")
        for row in rows:
            at = {
                name: value for name, value in row["at"].items() if name in {"tokens", "batch", "rows", "past_tokens"}
            }
            parts = " ".join(f"{part} {1e6 * seconds:.1f}" for part, seconds in row.get("parts_s", {}).items())
            print(f"  {at}: {1e6 * row['measured_s']:.1f} us, fit {100 * row['residual']:+.1f} % {parts}")
    print()
    for key, kernel in kernels.items():
        curve = kernel["efficiency"]
        points = ", ".join(f"{at:g}: {share:.3f}" for at, share in zip(curve["at"], curve["efficiency"], strict=True))
        latency = f"{1e6 * kernel['latency']['value']:.2f} us + " if "latency" in kernel else ""
        print(f"{key}: {latency}{points} (spread {curve['spread']:.3f})")
    print(f"\nall probes: {sum(record.took_s for record in records.values()):.1f} s")


def main() -> None:
    """Measure, fit, print, and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", nargs="?", type=Path, help="where to write samples and rates as JSON")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--hw", default="h200", help="the profile whose roofs the efficiencies are shares of")
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    machine, records = probed(PROBES, asked.device, quick=asked.quick)
    evidence = Evidence(machine=machine, records=records, date=datetime.now(UTC).date().isoformat())
    kernels, fitted = library_rates(records, load_profile(asked.hw), evidence.provenance)
    tell(records, kernels, fitted)
    if asked.report is not None:
        made = reported(machine, records) | msgspec.to_builtins({"kernels": kernels, "fitted": fitted})
        asked.report.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
