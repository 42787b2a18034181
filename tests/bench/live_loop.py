"""The live loop on the CPU, calibration then validation, alone or beside busy processes.

`python -m tests.bench.live_loop --busy 2 --kind spin --runs 3`; quiet runs without `--busy`.

Prints a line a run (held-out median error, coverage of the 90 % intervals, cases judged, seconds) and one of all runs.
What other people's processes do at the same time cannot be told from what the busy ones do: see the load average.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from twin.errors import EXIT_OUTSIDE_TOLERANCE

BUSY = {
    "spin": "while True: pass",
    "stream": "import numpy\na = numpy.ones(2**25)\nb = numpy.empty_like(a)\nwhile True: numpy.copyto(b, a)",
}
"""What a busy process does: counts, or copies 256 MiB from end to end."""


class Loop(NamedTuple):
    """One run."""

    cases: list[dict[str, Any]]
    """As `twin validate --json` has them."""
    not_judged: list[dict[str, Any]]
    calibrate_s: float
    validate_s: float


@contextmanager
def busy_processes(number: int, kind: str) -> Iterator[None]:
    """So many processes of a kind, ended on every path."""
    running = [subprocess.Popen([sys.executable, "-c", BUSY[kind]]) for _ in range(number)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def run_loop(folder: Path) -> Loop:
    """Calibrate and validate, both quick, in processes of their own; the files stay in `folder`."""
    profile, verdict = folder / "cpu.json", folder / "loop.json"
    begin = time.monotonic()
    _twin("calibrate", "--device", "cpu", "--quick", "-o", str(profile))
    calibrated = time.monotonic()
    _twin("validate", "--hw", str(profile), "--device", "cpu", "--quick", "--json", "-o", str(verdict))
    made = json.loads(verdict.read_text(encoding="utf-8"))
    return Loop(made["cases"], made["skipped"], calibrated - begin, time.monotonic() - calibrated)


def _twin(*arguments: str) -> None:
    ended = subprocess.run([sys.executable, "-m", "cli", *arguments], capture_output=True, text=True, check=False)
    if ended.returncode not in (0, EXIT_OUTSIDE_TOLERANCE):
        raise SystemExit(f"twin {' '.join(arguments)} ended with {ended.returncode}: {ended.stderr.strip()}")


def figures(cases: list[dict[str, Any]], not_judged: list[dict[str, Any]]) -> str:
    """Median error, coverage and how many cases could be judged."""
    if not cases:
        return f"none of {len(not_judged)} cases could be judged"
    error = statistics.median(abs(case["error"]) for case in cases)
    covered = sum(case["low"] <= case["measured"] <= case["high"] for case in cases)
    worst = max(cases, key=lambda case: abs(case["error"]))
    return (
        f"median error {error:.1%}, covered {covered} of {len(cases)} ({covered / len(cases):.0%}), "
        f"{len(not_judged)} not judged, worst {worst['id']} {worst['error']:+.0%}"
    )


def main() -> None:
    """Run and print."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--busy", type=int, default=0, help="processes beside the loop")
    asked.add_argument("--kind", choices=sorted(BUSY), default="spin", help="what they do")
    asked.add_argument("--runs", type=int, default=3)
    asked.add_argument("--folder", type=Path, help="where profiles and verdicts are kept [default: nowhere]")
    given = asked.parse_args()
    loops = []
    with tempfile.TemporaryDirectory() as scratch, busy_processes(given.busy, given.kind):
        for number in range(1, given.runs + 1):
            folder = (given.folder or Path(scratch)) / str(number)
            folder.mkdir(parents=True, exist_ok=True)
            loops.append(run_loop(folder))
            seconds = f"calibrate {loops[-1].calibrate_s:.0f} s, validate {loops[-1].validate_s:.0f} s"
            load = f"load average {os.getloadavg()[0]:.1f}"
            print(f"run {number}: {figures(loops[-1].cases, loops[-1].not_judged)}; {seconds}; {load}", flush=True)
            for case in loops[-1].not_judged:
                print(f"  not judged: {case['id']}: {case['reason']}")
    every = [case for loop in loops for case in loop.cases]
    print(f"all runs: {figures(every, [case for loop in loops for case in loop.not_judged])}")


if __name__ == "__main__":
    main()
