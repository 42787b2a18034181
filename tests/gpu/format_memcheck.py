"""Every kernel over every cache format once, on odd small sizes and checked: made for compute-sanitizer.

    python tests/gpu/format_memcheck.py report.json          # compiles, and checks the results
    compute-sanitizer --tool memcheck --kernel-name-exclude kns=_Z \\
        python tests/gpu/format_memcheck.py report.json --run-only

Of exllamav3's formats those that have every number of bits once for K and once for V. Names that begin with _Z are
torch's own kernels; under the checker each costs milliseconds, hence `--run-only`, which leaves the truth to the
first command. Several runs side by side, each with some of the `--formats`, share the device well. `--planted` launches
one kernel that writes beyond a tensor and nothing else: the checker must find it.

Tensors must be allocated one by one for the checker to see their ends, hence PYTORCH_NO_CUDA_MEMORY_CACHING below.
Exits with 1 if a result is wrong, whether or not the checker found anything.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).parents[2]))

from realkernels.codecs.decode import FORMS
from realkernels.format_append import FormatAppend
from realkernels.format_prefill import FormatPrefill
from realkernels.formats import Arrangement, arrangements, format_names
from realkernels.timed.attend_decode import AttendDecode
from realkernels.timed.call import TimedCall
from realkernels.timed.compile_ahead import Wanted, compile_ahead

TOLERANCE = 2e-2
DECODED = ((1, 1, 1), (301, 2, 1), (517, 1, 8))
"""Context, batch, query tokens."""

APPENDED = ((1, 0), (7, 125), (300, 3))
"""Tokens, tokens before them."""

PREFILLED = ((5, 0), (70, 444))
"""Rows, tokens before them."""

Kept = tuple[str, Arrangement]


def covering() -> list[str]:
    """Names of formats that together reach every kernel, and of exllamav3's every number of bits of either plane."""
    others = [name for name in format_names() if not name.startswith("exl3_")]
    bits = ((4, 4), (4, 8), (8, 4), (8, 8), (2, 3), (3, 2), (5, 6), (6, 7), (7, 5))
    return others + [f"exl3_k{k}v{v}" for k, v in bits]


def kept(names: list[str]) -> Iterator[Kept]:
    """Every format in every arrangement."""
    for name in names:
        for arrangement in arrangements(name):
            yield name, arrangement


@triton.jit
def beyond_the_end(numbers, count):
    """Write one number more than there are."""
    tl.store(numbers + count, 1.0)


def wrong_of(name: str, arrangement: Arrangement, device: torch.device, *, run_only: bool) -> Iterator[str]:
    """Each result that is not right; with `run_only` each that is not written, or not finite."""
    for tokens, past in APPENDED:
        appended = FormatAppend(name, arrangement=arrangement, tokens=tokens, past=past, layers=1, device=device)
        faults = appended.verify() if not run_only else _ran(appended)
        if faults:
            yield f"append of {tokens} at {past}: {faults}"
    if name not in FORMS:
        return
    for ctx, batch, rows in DECODED:
        sizes = {"ctx_tokens": ctx, "batch": batch, "q_tokens": rows}
        decode = AttendDecode(name, arrangement=arrangement, calls=2, device=device, **sizes)
        faults = _off(decode) if not run_only else _ran(decode)
        if faults:
            yield f"decode at {sizes}: {faults}"
    for rows, past in PREFILLED:
        chunk = FormatPrefill(
            name, arrangement=arrangement, rows=rows, ctx_tokens=rows + past, piece_tokens=256, device=device
        )
        faults = _off(chunk) if not run_only else _ran(chunk)
        if faults:
            yield f"prefill of {rows} at {past}: {faults}"


def _off(timed: TimedCall) -> str:
    error = timed.verify()
    return "" if error < TOLERANCE else f"{error:.1e}"


def _ran(timed: TimedCall | FormatAppend) -> str:
    timed.poison()
    timed.run()
    return "" if timed.finite() else "not finite"


def main() -> int:
    """0 if every result was right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", nargs="?", type=Path)
    parser.add_argument("--formats", default=",".join(covering()))
    parser.add_argument("--run-only", action="store_true", help="run every kernel, leave the results to another run")
    parser.add_argument("--planted", action="store_true", help="write beyond the end of a tensor, and nothing else")
    asked = parser.parse_args()
    device = torch.device("cuda")
    if asked.planted:
        numbers = torch.zeros(128, device=device)  # 512 B: a device's memory is given out in such pieces
        beyond_the_end[(1,)](numbers, numbers.numel())
        torch.cuda.synchronize()
        return 0
    pairs = list(kept(asked.formats.split(",")))
    if "CUDA_INJECTION64_PATH" not in os.environ:  # a checker would follow the compilers, too
        tokens = sorted({rows for _, _, rows in DECODED})
        ahead = [Wanted(*pair, rows) for pair in pairs if pair[0] in FORMS for rows in tokens]
        print(*compile_ahead(ahead, device="cuda:0"), sep="\n")
    report = {}
    for name, arrangement in pairs:
        found = list(wrong_of(name, arrangement, device, run_only=asked.run_only))
        report[f"{name} {arrangement}"] = found or ["ran" if asked.run_only else "right"]
        print(name, arrangement, *report[f"{name} {arrangement}"], sep="  ", flush=True)
    if asked.report is not None:
        asked.report.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return int(any(found not in (["right"], ["ran"]) for found in report.values()))


if __name__ == "__main__":
    sys.exit(main())
