"""Every kernel over every cache format once, on odd small sizes and checked: made for compute-sanitizer.

    python tests/gpu/format_memcheck.py                      # compiles, and checks the results
    compute-sanitizer --tool memcheck python tests/gpu/format_memcheck.py report.json

Of exllamav3's formats those that have every number of bits once for K and once for V. A checker takes minutes: several
runs side by side, each with some of the `--formats`, share the device well.

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

sys.path.insert(0, str(Path(__file__).parents[2]))

from realkernels.format_append import FormatAppend
from realkernels.format_decode import FormatDecode
from realkernels.format_kernels import KERNELS
from realkernels.format_prefill import FormatPrefill
from realkernels.format_warm import Wanted, compile_ahead
from realkernels.formats import Arrangement, arrangements, format_names

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


def wrong_of(name: str, arrangement: Arrangement, device: torch.device) -> Iterator[str]:
    """Each result that is not right."""
    for tokens, past in APPENDED:
        appended = FormatAppend(name, arrangement=arrangement, tokens=tokens, past=past, layers=1, device=device)
        faults = appended.verify()
        if faults:
            yield f"append of {tokens} at {past}: {faults}"
    if name not in KERNELS:
        return
    for ctx, batch, rows in DECODED:
        sizes = {"ctx_tokens": ctx, "batch": batch, "query_tokens": rows}
        error = FormatDecode(name, arrangement=arrangement, caches=2, device=device, **sizes).verify()
        if not error < TOLERANCE:
            yield f"decode at {sizes}: {error:.1e}"
    for rows, past in PREFILLED:
        sizes = {"rows": rows, "ctx_tokens": rows + past, "piece_tokens": 256}
        chunk = FormatPrefill(name, arrangement=arrangement, device=device, **sizes)
        error = chunk.verify()
        if not error < TOLERANCE:
            yield f"prefill of {rows} at {past}: {error:.1e}"


def main() -> int:
    """0 if every result was right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", nargs="?", type=Path)
    parser.add_argument("--formats", default=",".join(covering()))
    asked = parser.parse_args()
    device = torch.device("cuda")
    pairs = list(kept(asked.formats.split(",")))
    if "CUDA_INJECTION64_PATH" not in os.environ:  # a checker would follow the compilers, too
        tokens = sorted({rows for _, _, rows in DECODED})
        ahead = [Wanted(*pair, rows) for pair in pairs if pair[0] in KERNELS for rows in tokens]
        print(*compile_ahead(ahead, device="cuda:0"), sep="\n")
    report = {}
    for name, arrangement in pairs:
        found = list(wrong_of(name, arrangement, device))
        report[f"{name} {arrangement}"] = found or ["right"]
        print(name, arrangement, *(found or ["right"]), sep="  ", flush=True)
    if asked.report is not None:
        asked.report.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return int(any(found != ["right"] for found in report.values()))


if __name__ == "__main__":
    sys.exit(main())
