"""Appending to every cache format on a real GPU: the bytes that torch writes, then the time of a layer beside torch's.

Run as `python tests/gpu/append_suite.py report.json [--formats ...]`; 4 KV heads x 256, bf16 rows. KVarN is measured
once more where a token completes a tile.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))


from realkernels.codecs import Codec, KVarN, Planes, arrangements, codec_named
from realkernels.codecs.kvarn_check import tile_faults
from realkernels.kernels.append import append
from realkernels.timed.append import Append
from realkernels.timing import capture, event_seconds

FORMATS = (
    "bf16", "fp16", "fp32", "fp8", "int8_per_token_head", "fp8_per_token_head", "int4_per_token_head", "q8_0", "q4_0",
    "exl3_k2v3", "exl3_k4v4", "exl3_k5v6", "exl3_k8v8", "turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc",
    "turboquant_3bit_nc", "kvarn_k4v2_g128", "kvarn_k4v4_g128", "kvarn_k4v2_g64",
)  # fmt: skip
TOKENS = (1, 8, 512, 4096)
TORCH_TOKENS = {"kvarn": (1,), "": (1, 512, 4096)}
LAYERS = {1: 16, 8: 16, 512: 16, 4096: 4}
REPEATS = 15
SIZES = ((1, "bfloat16"), (7, "float16"), (100, "bfloat16"), (33, "float32"))
"""Tokens of a check and the type of their rows, in slots in any order; KVarN's in a row."""

TILED_SIZES = ((300, "bfloat16"), (1, "bfloat16"), (600, "float32"))
"""Of KVarN as well."""

SINK = 1
"""The tile that is never quantised."""

DEVICE = torch.device("cuda")
Row = dict[str, Any]


def rows_of(tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows with outliers, zeros, extremes, and NaN and infinity in the first, second and third token."""
    source = torch.Generator(DEVICE).manual_seed(seed)
    keys, values = (torch.randn(tokens, 4, 256, device=DEVICE, generator=source) for _ in range(2))
    keys[..., 3::29] *= 9
    values[::5] *= 1e3
    for place, what in enumerate((float("nan"), float("inf"), float("-inf"))):
        keys[place : place + 1, place, 40] = what
        values[place : place + 1, 3 - place, 7] = what
    keys[3:4, 1] = 0.0
    values[4:5, 2] = 0.25
    values[5:6] *= 1e5
    return keys, values


def planes_of(fmt: Codec, tokens: int) -> Planes:
    """Twice the room; KVarN with a sink in its second tile."""
    if isinstance(fmt, KVarN):
        return fmt.allocate(2 + 2 * tokens // 256, 256, 4, 256, DEVICE, side_tiles=6, sinks=(SINK,))
    return fmt.allocate(2 + 2 * tokens // 64, 64, 4, 256, DEVICE)


def correct(name: str, arrangement: Any) -> Row:
    """Bytes that differ from torch's, of all that were compared; for KVarN what is wrong with its tiles."""
    fmt = codec_named(name, arrangement=arrangement)
    row: Row = {"format": name, "arrangement": arrangement, "bytes": 0, "differ": 0}
    tiles = isinstance(fmt, KVarN)
    if tiles:
        row["faults"] = []
    for seed, (tokens, dtype) in enumerate(SIZES + TILED_SIZES * tiles):
        one, other = planes_of(fmt, tokens), planes_of(fmt, tokens)
        keys, values = rows_of(tokens, seed)
        keys, values = (rows.to(getattr(torch, dtype)) for rows in (keys, values))
        slots = torch.arange(tokens, device=DEVICE)
        if not tiles:
            slots = torch.randperm(one.slots, device=DEVICE)[:tokens]
        fmt.append(one, slots, keys, values)
        append(fmt, other, slots, keys, values, checked=False)
        pairs = [(one.tensors[part], other.tensors[part]) for part in one.tensors]
        pairs += [(one.sidecar[part], other.sidecar[part]) for part in one.sidecar]
        for first, second in pairs:
            at = first.view(torch.uint8) != second.view(torch.uint8)
            if first.is_floating_point() and not tiles:  # of plain rows NaN is NaN
                at = at.view(*first.shape, first.element_size()) & ~(first.isnan() & second.isnan())[..., None]
            row["differ"] += int(at.sum())
            row["bytes"] += at.numel()
        if isinstance(fmt, KVarN):
            row["faults"] += _faults(fmt, (one, other), keys, values)
    return row | {"right": not row["faults"] if tiles else row["differ"] == 0}


def _faults(fmt: KVarN, planes: tuple[Planes, Planes], keys: torch.Tensor, values: torch.Tensor) -> list[str]:
    """What is wrong with the full tiles of the second planes, and with which of the tokens they have lost."""
    one, other = planes
    slots = torch.arange(keys.shape[0], device=DEVICE)
    size, found = fmt.tile_tokens, []
    full = [tile for tile in range(keys.shape[0] // size) if tile != SINK]
    if full:
        rows = torch.cat([torch.arange(tile * size, (tile + 1) * size, device=DEVICE) for tile in full])
        found = tile_faults(fmt, other, full, keys[rows], values[rows])
    for first, second in zip(fmt.dequantise(one, slots), fmt.dequantise(other, slots), strict=True):
        if not torch.equal(first.isnan(), second.isnan()):
            found.append("other tokens are lost")
    return found


def median_s(timed: Append) -> float:
    """Of a layer, in a graph, on planes that hold none of the tokens."""
    timed.poison()
    graph = capture(timed.run, DEVICE)
    seconds = event_seconds(graph.replay, repeats=REPEATS, before=lambda _index: timed.poison())
    return statistics.median(seconds) / timed.calls


def timed_rows(name: str, arrangement: Any, until: float) -> Iterator[Row]:
    """Every number of tokens, fused and by torch."""
    make = partial(Append, name, arrangement=arrangement, device=DEVICE)
    kept_by_torch = TORCH_TOKENS["kvarn" if name.startswith("kvarn") else ""]
    points = [(tokens, 0) for tokens in TOKENS] + ([(1, 127), (1, 63)] if name.startswith("kvarn") else [])
    for tokens, past in points:
        row: Row = {"format": name, "arrangement": arrangement, "tokens": tokens, "past": past}
        timed = make(tokens=tokens, past_tokens=past, layers=LAYERS[tokens], fused=True)
        row |= {"seconds": median_s(timed), "moved_bytes": timed.moved_bytes}
        if tokens in kept_by_torch and past == 0 and time.monotonic() < until:
            layers = 2 if name.startswith("kvarn") else LAYERS[tokens]
            row["torch_seconds"] = median_s(make(tokens=tokens, layers=layers, fused=False))
        yield row


def tell(row: Row) -> None:
    """One line."""
    beside = f"{1e6 * row['torch_seconds']:9.1f}" if "torch_seconds" in row else 9 * " "
    rate = row["moved_bytes"] / row["seconds"] / 1e9
    what = f"{row['format']:22} {row['arrangement']:8} {row['tokens']:5} after {row['past']:3}"
    print(f"{what} {1e6 * row['seconds']:8.1f} us, torch {beside} us {rate:7.0f} GB/s", flush=True)


def main() -> int:
    """Check, time, print, write; 1 where anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path)
    parser.add_argument("--formats", nargs="*", default=FORMATS)
    parser.add_argument("--only", choices=("check", "time", "compile"), help="one part; compile what is timed")
    parser.add_argument("--torch-until-s", type=float, default=60.0, help="torch is not timed beside after so long")
    given = parser.parse_args()
    begin = time.monotonic()
    cases = [(name, kept) for name in given.formats for kept in arrangements(name)]
    if given.only == "compile":
        for name, kept in cases:
            for tokens in TOKENS:
                Append(name, arrangement=kept, tokens=tokens, layers=1, device=DEVICE).run()
        return 0
    checked = []
    for name, kept in () if given.only == "time" else cases:
        checked.append(correct(name, kept))
        print(
            {key: value for key, value in checked[-1].items() if value}, f"{time.monotonic() - begin:.1f} s", flush=True
        )
    timed: list[Row] = []
    for name, kept in () if given.only == "check" else cases:
        for row in timed_rows(name, kept, begin + given.torch_until_s):
            tell(row)
            timed.append(row)
    report = {"device": torch.cuda.get_device_name(), "correct": checked, "append": timed}
    given.report.write_text(
        json.dumps(report | {"took_s": time.monotonic() - begin}, indent=1) + "\n", encoding="utf-8"
    )
    return int(not all(row["right"] for row in checked))


if __name__ == "__main__":
    sys.exit(main())
