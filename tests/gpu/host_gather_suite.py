"""The sparse decode gather over quantised planes in host memory, on a real device: checked against float64, timed.

All formats read the same registered slabs, one a layer, one format after the other; a piece of them is appended and
repeated, since a gather reads only what it selects. Selections are fresh before each replay.
"""

import argparse
import contextlib
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from realkernels.codecs.interleaved import BLOCK_CODECS
from realkernels.format_gather import HostGather, RecordCache
from realkernels.gather import GatherBuffers, GatherPlan, gather_attend
from realkernels.gather_records import Reading, gather_records
from realkernels.host_slab import host_slab
from realkernels.shape import QsaShape
from realkernels.timing import capture, event_seconds
from tests.gpu.qsa_suite import machine, summary

SHAPE = QsaShape()
DEVICE = torch.device("cuda:0")
HALF = torch.float16
TOKEN_BYTES = 2 * SHAPE.kv_heads * SHAPE.head_dim * 2
PIECE_TOKENS = 65536
WORST_ERROR = 2e-3
MIB = 2**20


class Plain:
    """fp16 planes [tokens, kv_heads, head_dim] in the slabs."""

    name, shape, device, token_bytes = "fp16", SHAPE, DEVICE, TOKEN_BYTES

    def __init__(self, slabs: list[torch.Tensor], tokens: int) -> None:
        self.tokens = tokens
        size = (2, tokens, SHAPE.kv_heads, SHAPE.head_dim)
        self.layers = [slab[: tokens * TOKEN_BYTES].view(HALF).view(size) for slab in slabs]
        piece = torch.randn(PIECE_TOKENS, SHAPE.kv_heads, SHAPE.head_dim, device=DEVICE).to(HALF)
        for layer in self.layers:
            for plane in layer:
                for part in plane.split(PIECE_TOKENS):
                    part.copy_(piece[: part.shape[0]])

    def rows(self, layer: int, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of these tokens."""
        keys, values = self.layers[layer]
        return keys[tokens], values[tokens]


class PlainGather(HostGather):
    """The same over fp16 planes."""

    def _kernels(self) -> Callable[[int], None]:
        plan = GatherPlan()
        buffers = GatherBuffers.allocate(SHAPE, plan, DEVICE)
        return lambda layer: gather_attend(
            self.query[layer], *self.cache.layers[layer], self.selected[layer], self.end, self.output[layer], buffers,
            SHAPE, plan,
        )  # fmt: skip


def gather_of(cache: Plain | RecordCache, end: int) -> HostGather:
    """All layers of a cache over fresh selections of a context of `end` tokens."""
    return PlainGather(cache, end=end) if isinstance(cache, Plain) else HostGather(cache, end=end)


def timed(gather: HostGather, repeats: int) -> dict[str, Any]:
    """Median of replays of one graph of all layers, checked before and after."""
    before = gather.verify()
    graph = capture(gather.run, DEVICE)
    samples = event_seconds(graph.replay, repeats=repeats, before=gather.poison)
    after = gather.error()
    if not (before <= WORST_ERROR and after <= WORST_ERROR):
        raise SystemExit(f"{gather.cache.name} at {gather.end}: relative errors {before:.2e} and {after:.2e}")
    read = len(gather.cache.layers) * gather.link_bytes
    median = statistics.median(samples)
    return {
        "format": gather.cache.name, "end": gather.end, **summary(samples), "link_bytes": read,
        "link_gb_per_s": read / median / 1e9, "error_before": before, "error_after": after,
    }  # fmt: skip


def cache_of(name: str, slabs: list[torch.Tensor], tokens: int) -> Plain | RecordCache:
    """Planes of `tokens` tokens of a format in the slabs, filled."""
    if name == "fp16":
        return Plain(slabs, tokens)
    cache = RecordCache(name, slabs, shape=SHAPE, tokens=tokens)
    cache.fill()
    return cache


def measured(name: str, slabs: list[torch.Tensor], ends: list[int], repeats: int) -> list[dict[str, Any]]:
    """All ends, in what one format makes of the slabs."""
    before = torch.cuda.memory_allocated(DEVICE)
    rows = []
    for end in ends:
        cache = cache_of(name, slabs, end + 1)
        torch.cuda.reset_peak_memory_stats(DEVICE)
        row = timed(gather_of(cache, end), repeats)
        row["vram_mib"] = (torch.cuda.max_memory_allocated(DEVICE) - before) / MIB
        rows.append(row)
        words = f"{row['median_s'] * 1e3:.4f} ms, {row['link_gb_per_s']:.1f} GB/s, {row['error_after']:.1e}"
        print(name, end, words, flush=True)
        del cache
    return rows


def correct(slabs: list[torch.Tensor], ends: list[int]) -> dict[str, dict[int, float]]:
    """Errors of every format at odd ends; a selection out of range must be refused."""
    found: dict[str, dict[int, float]] = {}
    for name in ("fp16", *BLOCK_CODECS):
        for end in ends:
            gather = gather_of(cache_of(name, slabs[:2], end), end)
            error = gather.verify()
            found.setdefault(name, {})[end] = error
            if not error <= WORST_ERROR:
                raise SystemExit(f"{name} at {end}: relative error {error:.2e}")
        if name != "fp16":
            _refused(gather)
        print("correct", name, {end: f"{error:.1e}" for end, error in found[name].items()}, flush=True)
    return found


def _refused(gather: HostGather) -> None:
    cache, plan = gather.cache, GatherPlan()
    gather.selected[0, 3] = SHAPE.blocks(gather.end)
    with contextlib.suppress(IndexError):
        gather_records(
            gather.query[0], cache.layers[0], gather.selected[0], gather.end, gather.output[0],
            GatherBuffers.allocate(SHAPE, plan, DEVICE), SHAPE, plan, Reading.of(cache.format, SHAPE, device=DEVICE),
        )  # fmt: skip
        raise SystemExit(f"{cache.name}: a block beyond the context was not refused")


def ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each format at each end over fp16, in time and in bytes."""
    by_case = {(row["format"], row["end"]): row for row in rows}
    return [
        {
            "format": name, "end": end, "median_s": row["median_s"],
            "of_fp16": row["median_s"] / by_case["fp16", end]["median_s"],
            "bytes_of_fp16": row["link_bytes"] / by_case["fp16", end]["link_bytes"],
        }
        for (name, end), row in by_case.items()
    ]  # fmt: skip


def main() -> None:
    """Check, then time, and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path)
    parser.add_argument("--tokens", type=int, default=1_048_320)
    parser.add_argument("--short", type=int, default=65_536)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=20)
    asked = parser.parse_args()
    report: dict[str, Any] = {"machine": machine(), "layers": asked.layers}
    save: Callable[[], object] = lambda: asked.report.write_text(json.dumps(report, indent=1) + "\n")  # noqa: E731
    with contextlib.ExitStack() as stack:
        slabs = [
            stack.enter_context(host_slab(asked.tokens * TOKEN_BYTES, device=DEVICE)).device
            for _ in range(asked.layers)
        ]
        report["correct"] = correct(slabs, [2_051, 4_098, 6_145, asked.short - 4])
        report["rows"] = []
        for name in ("fp16", *BLOCK_CODECS):
            report["rows"] += measured(name, slabs, [asked.short - 1, asked.tokens - 1], asked.repeats)
            save()
        report["ratios"] = ratios(report["rows"])
        save()
        for row in report["ratios"]:
            words = f"{row['of_fp16']:.3f} of fp16's time, {row['bytes_of_fp16']:.3f} of its bytes"
            print(row["format"], row["end"], words)
        torch.cuda.synchronize()
        del slabs


if __name__ == "__main__":
    main()
