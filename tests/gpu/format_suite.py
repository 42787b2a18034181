"""Attention over every cache format on a real GPU: correct at odd lengths, then one layer's time beside torch's own.

Run as `python tests/gpu/format_suite.py report.json`; it takes about two minutes. 24 query heads, 4 KV heads x 256.
With `--in-turn` only bf16 and flash attention of torch are timed, a call of each by turns: they are closer than the
clocks of one minute are to those of the next.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from calibrate.probes.device_kernels import Sum
from calibrate.probes.formats import KEPT, TOLERANCE
from calibrate.probes.machine import describe
from realkernels.backend import open_backend
from realkernels.format_append import FormatAppend
from realkernels.format_pool import NoKernel
from realkernels.timed.attend_decode import AttendDecode
from realkernels.timed.compile_ahead import Wanted, compile_ahead
from tests.gpu.torch_attention import ENOUGH_S, torch_attentions

CTX = 131_072
BATCHES = (1, 8)
QUERY_TOKENS = (1, 8)
ODD = ((1, 1, 1), (257, 2, 8), (1_000, 3, 1), (4_099, 1, 8), (8, 5, 8))
"""Context, batch, query tokens of what is checked before anything is timed."""

APPEND_LAYERS = 16
REPEATS = 20
WARM_TURNS, TURNS = 3, 30
BASELINE = "bf16"
Row = dict[str, Any]


def correct(name: str, arrangement: Any, device: torch.device) -> Row:
    """Worst error over the odd lengths, or why there is none."""
    row: Row = {"format": name, "arrangement": arrangement}
    try:
        errors = []
        for ctx, batch, tokens in ODD:
            timed = AttendDecode(
                name, arrangement=arrangement, batch=batch, ctx_tokens=ctx, q_tokens=tokens, calls=2, device=device
            )
            errors.append(timed.verify())
    except NoKernel as missing:
        return row | {"skipped": str(missing)}
    worst = max(errors)
    return row | {"errors": errors, "right": worst < TOLERANCE}


def median_s(backend: Any, work: Callable[[], object], *, per: int = 1, before: Any = None) -> float:
    """Of one of `per` calls, in a graph."""
    seconds = backend.seconds(backend.capture(work), repeats=REPEATS, warm_up=3, before=before)
    return statistics.median(seconds) / per


def decoded(backend: Any) -> Iterator[Row]:
    """One layer's attention over every format's cache, at every batch and number of query tokens."""
    for batch in BATCHES:
        for tokens in QUERY_TOKENS:
            for name, arrangement in KEPT:
                row: Row = {"kernel": name, "arrangement": arrangement, "batch": batch, "query_tokens": tokens}
                try:
                    timed = AttendDecode(
                        name, arrangement=arrangement, batch=batch, ctx_tokens=CTX, q_tokens=tokens,
                        device=backend.device,
                    )  # fmt: skip
                except NoKernel as missing:
                    yield row | {"skipped": str(missing)}
                    continue
                seconds = median_s(backend, timed.run, per=timed.calls, before=lambda _index, of=timed: of.poison())
                error = timed.error()
                yield row | {
                    "seconds": seconds, "bytes": timed.cache_bytes, "error": error, "right": error < TOLERANCE,
                    "rotated": timed.rotates,
                }  # fmt: skip
                del timed
                torch.cuda.empty_cache()


def beside(backend: Any, until: float) -> Iterator[Row]:
    """The same with torch's own attention over bf16 caches that are not paged, unmasked."""
    for batch in BATCHES:
        for tokens in QUERY_TOKENS:
            for name, work, nbytes in torch_attentions(
                batch=batch, ctx_tokens=CTX, query_tokens=tokens, device=backend.device, late=time.monotonic() > until
            ):
                row: Row = {"kernel": name, "arrangement": "", "batch": batch, "query_tokens": tokens}
                try:
                    yield row | {"seconds": median_s(backend, work), "bytes": nbytes}
                except Exception as refused:  # noqa: BLE001 - whichever way a back end says no, the others go on
                    words = str(refused).strip().splitlines() or [type(refused).__name__]
                    yield row | {"skipped": words[0][:120]}
            torch.cuda.empty_cache()


def in_turn(backend: Any) -> Iterator[Row]:
    """Attention over bf16 here and in torch (flash), one query token, by turns."""
    for batch in BATCHES:
        own = AttendDecode(BASELINE, batch=batch, ctx_tokens=CTX, calls=1, device=backend.device)
        name, work, nbytes = next(
            torch_attentions(batch=batch, ctx_tokens=CTX, query_tokens=1, device=backend.device, late=True)
        )
        graphs = {BASELINE: backend.capture(own.run), name: backend.capture(work)}
        own.poison()
        samples: dict[str, list[float]] = {kernel: [] for kernel in graphs}
        for _ in range(WARM_TURNS + TURNS):
            for kernel, graph in graphs.items():
                samples[kernel] += backend.seconds(graph, repeats=1, warm_up=0)
        right = own.error() < TOLERANCE
        for kernel, seconds in samples.items():
            median = statistics.median(seconds[WARM_TURNS:])
            yield {
                "kernel": kernel, "arrangement": "", "batch": batch, "query_tokens": 1, "seconds": median,
                "bytes": nbytes, "right": right,
            }  # fmt: skip
        del own, work, graphs
        torch.cuda.empty_cache()


def appended(backend: Any) -> Iterator[Row]:
    """One token of one layer into every format's cache, of 16 layers in a graph."""
    for name, arrangement in KEPT:
        timed = FormatAppend(name, arrangement=arrangement, tokens=1, layers=APPEND_LAYERS, device=backend.device)
        right = not timed.verify()
        seconds = median_s(backend, timed.run, per=APPEND_LAYERS)
        yield {"format": name, "arrangement": arrangement, "seconds": seconds, "right": right and timed.finite()}


def read_rate(backend: Any) -> float:
    """Bytes a second of summing 4 GiB."""
    data = torch.randint(0, 16, (2**30,), dtype=torch.int32, device=backend.device)
    return data.nbytes / median_s(backend, Sum(data).run)


def with_ratios(rows: list[Row]) -> list[Row]:
    """Each time over that of this project's bf16 kernel at the same batch and query tokens."""
    plain = {
        (row["batch"], row["query_tokens"]): row["seconds"]
        for row in rows
        if row["kernel"] == BASELINE and "seconds" in row
    }
    return [
        row | {"of_bf16": row["seconds"] / plain[place]}
        if "seconds" in row and (place := (row["batch"], row["query_tokens"])) in plain
        else row
        for row in rows
    ]


def tell(report: Row) -> None:
    """The tables."""
    print(f"\n{report['machine']['name']}: reads {report['vram_read_bytes_per_s'] / 1e12:.3f} TB/s; {report['clocks']}")
    for row in report["correct"]:
        what = row.get("skipped") or f"worst error {max(row['errors']):.1e}" + ("" if row["right"] else "  WRONG")
        print(f"  {row['format']} ({row['arrangement']}): {what}")
    for batch in BATCHES:
        for tokens in QUERY_TOKENS:
            print(f"\ncontext {CTX:,}, batch {batch}, {tokens} query tokens, one layer")
            for row in report["decode"]:
                if (row["batch"], row["query_tokens"]) == (batch, tokens):
                    print("  " + _line(row))
    print("\nby turns", *(f"  {row['batch']}: {_line(row)}" for row in report["in_turn"]), sep="\n")
    print(f"\nappend of one token, of a layer ({APPEND_LAYERS} in a graph)")
    for row in report["append"]:
        wrong = "" if row["right"] else "  WRONG"
        print(f"  {row['format']:24} {row['arrangement']:8} {1e6 * row['seconds']:8.1f} us{wrong}")
    print(f"\n{report['took_s']:.0f} s")


def _line(row: Row) -> str:
    name = f"{row['kernel']:24} {row['arrangement']:8}"
    if "skipped" in row:
        return f"{name} skipped: {row['skipped']}"
    rate = f"{row['bytes'] / row['seconds'] / 1e9:7.0f} GB/s"
    ratio = f"{row['of_bf16']:6.2f} x bf16" if "of_bf16" in row else ""
    wrong = "" if row.get("right", True) else "  WRONG"
    return f"{name} {1e6 * row['seconds']:9.1f} us {rate} {ratio}{wrong}"


def main() -> int:
    """Check, time, print, write; 1 where anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path)
    parser.add_argument("--in-turn", action="store_true", help="only bf16 and torch's flash attention, by turns")
    begin = time.monotonic()
    asked = parser.parse_args()
    path, backend = asked.report, open_backend("cuda")
    if asked.in_turn:
        rows = list(in_turn(backend))
        print(*(f"{row['batch']}: {_line(row)}" for row in rows), sep="\n")
        path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        return int(not all(row["right"] for row in rows))
    machine = describe(str(backend.device), dtype="bf16")
    wanted = [Wanted(name, arrangement, tokens) for name, arrangement in KEPT for tokens in QUERY_TOKENS]
    failed = compile_ahead(wanted, device=str(backend.device))
    print(f"compiled in {time.monotonic() - begin:.0f} s", *failed, sep="\n")
    checked = [correct(name, arrangement, backend.device) for name, arrangement in KEPT]
    timed, written, rate = list(decoded(backend)), list(appended(backend)), read_rate(backend)
    turns = list(in_turn(backend))
    timed += beside(backend, begin + ENOUGH_S)  # last: what torch refuses while it is captured may break a stream
    report = {
        "machine": msgspec.to_builtins(machine) | {"device_id": ""},
        "date": datetime.now(UTC).date().isoformat(),
        "clocks": ", ".join(f"{key} {machine.smi.get(key, '?')}" for key in ("clocks.max.sm", "power.limit")),
        "vram_read_bytes_per_s": rate,
        "correct": checked,
        "in_turn": turns,
        "decode": with_ratios(timed),
        "append": written,
        "after": describe(str(backend.device), dtype="bf16").smi,
        "took_s": time.monotonic() - begin,
    }
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    tell(report)
    everything = [*checked, *turns, *report["decode"], *report["append"]]
    return int(not all(row.get("right", True) for row in everything))


if __name__ == "__main__":
    sys.exit(main())
