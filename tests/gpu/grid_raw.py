"""Times the validation grid and the calibration points without comparing: raw rows to look at."""

import json
import sys
import time
from pathlib import Path

from calibrate.grid import long_curve, validation_grid
from calibrate.measure import LeftOut, measure
from realkernels.backend import open_backend


def main() -> None:
    """Write every outcome to argv[1] as it comes."""
    backend = open_backend("cuda:0")
    cases = validation_grid(quick=False, device="cuda")
    cases += [case for tier in ("vram", "host") for case in long_curve(tier, most_tokens=2**20)]
    rows = []
    for case in measure(list({case.id: case for case in cases}.values()), backend):
        if isinstance(case, LeftOut):
            rows.append({"id": case.case.id, "left_out": case.reason})
        else:
            rows.append({"id": case.case.id, "median_s": case.median_s, "spread": case.spread, "error": case.error})
        print(f"{time.perf_counter():8.1f}", json.dumps(rows[-1]), flush=True)
        Path(sys.argv[1]).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
