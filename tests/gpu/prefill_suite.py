"""Prefill chunks over every cache format on a real GPU: correct at odd sizes, then time, unpacking's share and scratch.

Run as `python tests/gpu/prefill_suite.py report.json`; it takes about a minute. 24 query heads, 4 KV heads x 256.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from realkernels.chunk import PIECE_TOKENS, flash_piece
from realkernels.codecs.decode import FORMS
from realkernels.format_pool import default_arrangement
from realkernels.format_prefill import FormatPrefill
from realkernels.formats import arrangements
from realkernels.library import relative_error
from realkernels.timing import capture, event_seconds

ROOT = Path(__file__).parents[2]
ROWS, PAST = 2048, 131_072
PASTS = (32_768, 131_072)
"""Where the scratch is measured."""

ODD = ((1, 1, 512), (19, 1_031, 512), (777, 1_300, 256), (32, 9_001, 8_192))
"""Rows, context and tokens of a piece of what is checked before anything is timed."""

SMALLER = ((512, 16_384), (2_048, 16_384), (512, 65_536), (2_048, 65_536))
SMALLER_FORMATS = ("bf16", "int8_per_token_head", "kvarn_k4v2_g128")
EXPANDED = (512, 2_048, 8_192, 65_536)
TOLERANCE = 2e-2
REPEATS = 7
PROCESSES = 8
DEVICE = torch.device("cuda")
KEPT = [(name, default_arrangement(name)) for name in FORMS]
BOTH = [(name, arrangement) for name in FORMS for arrangement in arrangements(name)]
Row = dict[str, Any]


def warm(shares: list[list[str]]) -> None:
    """Compile the kernels of all formats side by side, in processes of their own."""
    asked = [[sys.executable, __file__, "--warm", *share] for share in shares if share]
    for process in [subprocess.Popen(words, env=os.environ | {"PYTHONPATH": str(ROOT)}) for words in asked]:
        process.wait()


def compile_some(names: list[str]) -> None:
    """Run each format once over 512 tokens."""
    for each in names:
        name, arrangement = each.split(":")
        FormatPrefill(name, arrangement=arrangement, rows=300, ctx_tokens=600, piece_tokens=256, device=DEVICE).run()
    torch.cuda.synchronize()


def correct(name: str, arrangement: Any) -> Row:
    """Worst error of attention over the odd sizes; share of unpacked numbers that are not those of `read`."""
    errors, wrong = [], 0.0
    for rows, ctx, piece in ODD:
        timed = FormatPrefill(
            name, arrangement=arrangement, rows=rows, ctx_tokens=ctx, piece_tokens=piece, caches=1, device=DEVICE
        )
        errors.append(timed.verify())
        wrong = max(wrong, timed.expand_error())
    right = max(errors) < TOLERANCE and wrong == 0
    return {"format": name, "arrangement": arrangement, "errors": errors, "other_numbers": wrong, "right": right}


def median_s(work: Callable[[], object], *, per: int = 1) -> float:
    """Of one of `per` calls, in a graph."""
    return statistics.median(event_seconds(capture(work, DEVICE).replay, repeats=REPEATS, warm_up=2)) / per


def chunk(name: str, arrangement: Any, rows: int, past: int) -> tuple[Row, list[Row]]:
    """One chunk of a layer, its unpacking alone, and that of fewer tokens; a cache is larger than the device's L2."""
    timed = FormatPrefill(name, arrangement=arrangement, rows=rows, ctx_tokens=past + rows, caches=1, device=DEVICE)
    timed.poison()
    seconds, expand_s = median_s(timed.run), median_s(timed.run_expand)
    timed.poison()
    timed.run()
    truth = timed.pool.attend(timed.query[-1, :6], 0, 0, seen=past + rows)
    error = relative_error(timed.output[-1, :6], truth) if timed.finite() else float("inf")
    row = {
        "format": name, "arrangement": arrangement, "rows": rows, "past": past, "seconds": seconds,
        "expand_s": expand_s, "share": expand_s / seconds, "flops": timed.flops, "expanded_bytes": timed.expanded_bytes,
        "cache_bytes": timed.cache_bytes, "error": error, "right": error < TOLERANCE,
    }  # fmt: skip
    parts = []
    for tokens in EXPANDED if past == PAST else ():
        taken = median_s(lambda count=tokens: timed.run_expand(tokens=count))
        share = tokens / timed.ctx_tokens
        parts.append({"format": name, "tokens": tokens, "seconds": taken, "bytes": share * timed.expanded_bytes})
    return row, parts


def whole(rows: int, past: int) -> Row:
    """Torch's flash attention in one call over K and V that lie as one piece, bf16: nothing to unpack or fold."""
    query = torch.randn(rows, 24, 256, dtype=torch.bfloat16, device=DEVICE)
    keys, values = torch.randn(2, past + rows, 4, 256, dtype=torch.bfloat16, device=DEVICE)
    seconds = median_s(lambda: flash_piece(query, keys, values, causal=True))
    return {"rows": rows, "past": past, "seconds": seconds}


def scratch(name: str, past: int) -> Row:
    """Bytes that a chunk takes at its peak beside cache, queries, outputs and what `scratch` counts."""
    timed = FormatPrefill(name, rows=ROWS, ctx_tokens=past + ROWS, caches=1, device=DEVICE)
    timed.run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    timed.run()
    torch.cuda.synchronize()
    beside = torch.cuda.max_memory_allocated() - before
    return {
        "format": name, "past": past, "scratch_bytes": timed.scratch.bytes, "beside_bytes": beside,
        "cache_bytes": timed.cache_bytes,
    }  # fmt: skip


def of_types() -> Iterator[Row]:
    """Error of a chunk with pieces and queries in bf16 and in fp16 against float64 over the unpacked cache."""
    for name in ("int8_per_token_head", "exl3_k8v8", "int4_per_token_head"):
        for dtype in (torch.bfloat16, torch.float16):
            timed = FormatPrefill(name, rows=64, ctx_tokens=8_192, caches=1, dtype=dtype, device=DEVICE)
            yield {"format": name, "dtype": str(dtype).removeprefix("torch."), "error": timed.verify()}


def tell(report: Row) -> None:
    """What is new in the report."""
    for row in report.get("correct", ()):
        wrong = "" if row["right"] else "  WRONG"
        print(f"  {row['format']:24} {row['arrangement']:8} {max(row['errors']):.1e} {row['other_numbers']:.1e}{wrong}")
    plain = next((row["seconds"] for row in report.get("chunks", ())), 0.0)
    for row in (*report.get("chunks", ()), *report.get("smaller", ())):
        wrong = "" if row["right"] else f"  WRONG {row['error']:.1e}"
        print(
            f"  {row['format']:20} {row['rows']:5} {row['past']:7} {1e3 * row['seconds']:8.3f} ms"
            f" {row['seconds'] / (plain or row['seconds']):6.3f} x, unpacking {1e3 * row['expand_s']:6.3f} ms"
            f" {100 * row['share']:4.1f} %, {row['flops'] / row['seconds'] / 1e12:5.0f} TFLOP/s{wrong}"
        )
    for row in report.get("expanded", ()):
        gbs = row["bytes"] / row["seconds"] / 1e9
        print(f"  unpack {row['format']:20} {row['tokens']:6} {1e6 * row['seconds']:8.1f} us {gbs:6.0f} GB/s")
    for row in (*report.get("whole", ()), *report.get("scratch", ()), *report.get("types", ())):
        print(" ", row)
    sys.stdout.flush()


def measured() -> Iterator[Row]:
    """The parts of the report, the most wanted first."""
    yield {"correct": [correct(*each) for each in BOTH]}
    found = [chunk(*each, ROWS, PAST) for each in KEPT]
    yield {"chunks": [row for row, _ in found], "expanded": [part for _, parts in found for part in parts]}
    yield {"scratch": [scratch(name, past) for name in ("int4_per_token_head", "bf16") for past in PASTS]}
    yield {"whole": [whole(ROWS, PAST), *[whole(*size) for size in SMALLER]]}
    smaller = [(name, size) for name in SMALLER_FORMATS for size in SMALLER]
    yield {"smaller": [chunk(name, default_arrangement(name), *size)[0] for name, size in smaller]}
    yield {"types": list(of_types())}


def main() -> int:
    """Check, time, print, write; 1 where anything was wrong. The report is written anew after each part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path, nargs="?", default=Path("prefill_suite.json"))
    parser.add_argument("--warm", nargs="+", help="only compile these kernels")
    asked = parser.parse_args()
    if asked.warm:
        compile_some(asked.warm)
        return 0
    begin = time.monotonic()
    names = [f"{name}:{arrangement}" for name, arrangement in BOTH]
    warm([names[first::PROCESSES] for first in range(PROCESSES)])
    report = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__,
        "date": datetime.now(UTC).date().isoformat(), "piece_tokens": PIECE_TOKENS,
        "compiled_s": time.monotonic() - begin,
    }  # fmt: skip
    for part in measured():
        report |= part | {"took_s": time.monotonic() - begin}
        asked.report.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(f"after {report['took_s']:.0f} s")
        tell(part)
    rows = (*report["correct"], *report["chunks"], *report["smaller"])
    return int(not all(row["right"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
