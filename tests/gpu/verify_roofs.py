"""What holds the decode attention kernels at 1 and at 8 query tokens: a profiler's counters, format by format.

Run as `python tests/gpu/verify_roofs.py report.json` where Nsight Compute (`ncu`) may read the hardware counters; about
a minute and a half. One layer of one sequence of 131,072 tokens, 24 query heads, 4 KV heads x 256, one launch each.
"""

import argparse
import csv
import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from realkernels.codecs import default_arrangement
from realkernels.timed.attend_decode import AttendDecode
from realkernels.timed.compile_ahead import Wanted, compile_ahead

CTX = 131_072
QUERY_TOKENS = (1, 4, 8)
FORMATS = (
    "bf16", "fp8", "int8_per_token_head", "int4_per_token_head", "q4_0", "exl3_k4v4", "turboquant_4bit_nc",
    "kvarn_k4v2_g128",
)  # fmt: skip
SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis", "LaunchStats", "Occupancy", "SchedulerStats", "WarpStateStats")
COUNTERS = {
    "seconds": "gpu__time_duration.sum",
    "registers": "launch__registers_per_thread",
    "programs": "launch__grid_size",
    "threads": "launch__block_size",
    "dram_share": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "issue_share": "sm__inst_issued.avg.pct_of_peak_sustained_active",
    "tensor_share": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "alu_share": "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active",
    "fma_share": "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active",
    "warps_a_scheduler": "smsp__warps_active.avg.per_cycle_active",
}
STALL = "smsp__average_warps_issue_stalled_"
UNITS = {"nsecond": 1e-9, "ns": 1e-9, "usecond": 1e-6, "us": 1e-6, "msecond": 1e-3, "ms": 1e-3, "%": 1e-2}
"""Into seconds and shares; anything else stays as it is."""

Row = dict[str, Any]


def cases() -> list[tuple[str, int]]:
    """Format and query tokens, in the order of their launches."""
    return [(name, tokens) for name in FORMATS for tokens in QUERY_TOKENS]


def launch() -> None:
    """One call each."""
    for name, tokens in cases():
        call = AttendDecode(name, ctx_tokens=CTX, q_tokens=tokens, caches=1, device=torch.device("cuda"))
        call.run()
        torch.cuda.synchronize()
        del call
        torch.cuda.empty_cache()


def profiled() -> Iterator[Row]:
    """Counters of each call's attention kernel."""
    command = ["ncu", "--target-processes", "application-only", "--clock-control", "none", "--csv", "--page", "raw"]
    command += ["--kernel-name", "regex:attend"]
    for section in SECTIONS:
        command += ["--section", section]
    told = subprocess.run(
        [*command, sys.executable, str(Path(__file__).resolve()), "--launch"],
        stdout=subprocess.PIPE, text=True, check=False,
    ).stdout  # fmt: skip
    lines = told.splitlines()
    first = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), None)
    if first is None:
        raise SystemExit(f"ncu gave no counters: {' '.join(lines[-3:])[:300]}")
    head, units, *rows = csv.reader(lines[first:])
    if len(rows) != len(cases()):
        raise SystemExit(f"ncu saw {len(rows)} kernels in place of {len(cases())}")
    for (name, tokens), row in zip(cases(), rows, strict=True):
        counters = {
            counter: (value, unit) for counter, value, unit in zip(head, row, units, strict=True) if value
        }  # fmt: skip
        yield {"format": name, "query_tokens": tokens, "kernel": counters["Kernel Name"][0], **counted(counters)}


def counted(counters: dict[str, tuple[str, str]]) -> Row:
    """Seconds, shares, counts, and stalled warps an issued instruction by their reason, the largest first."""
    numbers = {
        name: float(value.replace(",", "")) * UNITS.get(unit, 1.0)
        for name, counter in COUNTERS.items() if counter in counters
        for value, unit in [counters[counter]]
    }  # fmt: skip
    stalls = {
        counter.removeprefix(STALL).split("_per_issue")[0]: float(value.replace(",", ""))
        for counter, (value, _) in counters.items()
        if counter.startswith(STALL) and "_per_issue_active.ratio" in counter and "_not_issued" not in counter
    }
    most = sorted(stalls.items(), key=lambda stall: -stall[1])[:6]
    return numbers | {"stalled_warps_an_issue": {name: value for name, value in most if value >= 0.05}}


def main() -> int:
    """Compile, profile, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path, nargs="?")
    parser.add_argument("--launch", action="store_true", help="only call the kernels, for the profiler")
    asked = parser.parse_args()
    if asked.launch:
        launch()
        return 0
    wanted = [Wanted(name, default_arrangement(name), tokens) for name, tokens in cases()]
    print(*compile_ahead(wanted, device="cuda:0"), sep="\n")
    rows = list(profiled())
    for row in rows:
        print(row, flush=True)
    if asked.report is not None:
        report = {
            "device": torch.cuda.get_device_name(), "torch": torch.__version__,
            "date": datetime.now(UTC).date().isoformat(), "ctx_tokens": CTX, "rows": rows,
        }  # fmt: skip
        asked.report.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
