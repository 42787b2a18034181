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

from realkernels import reference
from realkernels.bounds import check_selected
from realkernels.formats import Planes, format_named
from realkernels.formats.blocks import BLOCK_FORMATS, block_planes
from realkernels.gather import GatherBuffers, GatherPlan, gather_attend
from realkernels.gather_records import Reading, gather_records
from realkernels.host_slab import host_slab
from realkernels.shape import QsaShape
from realkernels.timing import capture, event_seconds
from tests.gpu.qsa_suite import machine, relative_error, summary

SHAPE = QsaShape()
DEVICE = torch.device("cuda:0")
HALF = torch.float16
TOKEN_BYTES = 2 * SHAPE.kv_heads * SHAPE.head_dim * 2
PIECE_TOKENS = 65536
APPENDED = 8192
WORST_ERROR = 2e-3
PLANS = tuple(GatherPlan(blocks_per_split=blocks, num_warps=warps) for blocks, warps in ((8, 4),))
MIB = 2**20


class Plain:
    """fp16 planes [tokens, kv_heads, head_dim] in the slabs."""

    name = "fp16"
    token_bytes = TOKEN_BYTES

    def __init__(self, slabs: list[torch.Tensor], tokens: int) -> None:
        size = (2, tokens, SHAPE.kv_heads, SHAPE.head_dim)
        self.layers = [slab[: tokens * TOKEN_BYTES].view(HALF).view(size) for slab in slabs]
        piece = torch.randn(PIECE_TOKENS, SHAPE.kv_heads, SHAPE.head_dim, device=DEVICE).to(HALF)
        for layer in self.layers:
            for plane in layer:
                for part in plane.split(PIECE_TOKENS):
                    part.copy_(piece[: part.shape[0]])

    def attend(self, layer: int, step: "Decode") -> None:
        """One layer."""
        gather_attend(
            step.query[layer], *self.layers[layer], step.selected[layer], step.end, step.output[layer], step.buffers,
            SHAPE, step.plan,
        )  # fmt: skip

    def rows(self, layer: int, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of these tokens."""
        keys, values = self.layers[layer]
        return keys[tokens], values[tokens]


class Coded:
    """Records of a format in the slabs."""

    def __init__(self, name: str, slabs: list[torch.Tensor], tokens: int) -> None:
        self.name, self.fmt = name, format_named(name)
        self.reading = Reading.of(self.fmt, SHAPE, device=DEVICE)
        blocks = -(-tokens // SHAPE.ratio)
        self.token_bytes = self.reading.record_bytes // SHAPE.ratio
        piece = self._piece(min(blocks, PIECE_TOKENS // SHAPE.ratio))
        self.layers: list[Planes] = []
        for slab in slabs:
            memory = slab[: blocks * self.reading.record_bytes].view(blocks, self.reading.record_bytes)
            for part in memory.split(piece.shape[0]):
                part.copy_(piece[: part.shape[0]])
            self.layers.append(self._planes(memory))
        new = torch.randn(2, 7, SHAPE.kv_heads, SHAPE.head_dim, device=DEVICE)
        for planes in self.layers:  # the newest tokens one by one, from the device into host memory
            for place in range(7):
                self.fmt.append(planes, [tokens - 7 + place], new[0, place : place + 1], new[1, place : place + 1])

    def _planes(self, memory: torch.Tensor) -> Planes:
        return block_planes(
            self.fmt, blocks=memory.shape[0], block_tokens=SHAPE.ratio, kv_heads=SHAPE.kv_heads,
            head_dim=SHAPE.head_dim, memory=memory,
        )  # fmt: skip

    def _piece(self, blocks: int) -> torch.Tensor:
        memory = torch.zeros(blocks, self.reading.record_bytes, dtype=torch.uint8, device=DEVICE)
        planes = self._planes(memory)
        for first in range(0, planes.slots, APPENDED):
            slots = torch.arange(first, min(first + APPENDED, planes.slots), device=DEVICE)
            rows = torch.randn(2, len(slots), SHAPE.kv_heads, SHAPE.head_dim, device=DEVICE)
            self.fmt.append(planes, slots, rows[0], rows[1], checked=False)
        return memory

    def attend(self, layer: int, step: "Decode") -> None:
        """One layer."""
        gather_records(
            step.query[layer], self.layers[layer], step.selected[layer], step.end, step.output[layer], step.buffers,
            SHAPE, step.plan, self.reading, checked=False,
        )  # fmt: skip

    def rows(self, layer: int, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of these tokens in the model's basis."""
        return self.fmt.unpack(self.layers[layer], tokens, checked=False)


class Decode:
    """All layers of a cache over fresh selections of a context of `end` tokens."""

    def __init__(self, cache: Plain | Coded, end: int, plan: GatherPlan) -> None:
        self.cache, self.end, self.plan = cache, end, plan
        layers = len(cache.layers)
        self.query = torch.randn(layers, SHAPE.query_heads, SHAPE.head_dim, device=DEVICE).to(HALF)
        self.output = torch.empty_like(self.query)
        self.selected = torch.empty(layers, SHAPE.topk, dtype=torch.int32, device=DEVICE)
        self.buffers = GatherBuffers.allocate(SHAPE, plan, DEVICE)
        self.refresh()

    def refresh(self, _index: int = 0) -> None:
        """Any blocks, in any order."""
        for row in self.selected:
            row.copy_(torch.randperm(SHAPE.blocks(self.end), device=DEVICE)[: SHAPE.topk])
        self.output.fill_(float("nan"))

    def run(self) -> None:
        """Every layer."""
        for layer in range(len(self.cache.layers)):
            self.cache.attend(layer, self)

    def error(self) -> float:
        """Worst relative error of a layer against float64 attention over the unpacked cache."""
        check_selected(self.selected, blocks=SHAPE.blocks(self.end))
        worst = 0.0
        for layer in range(len(self.cache.layers)):
            tokens = reference.selected_tokens(self.selected[layer].long(), self.end, SHAPE.ratio)
            truth = reference.attend(self.query[layer], *self.cache.rows(layer, tokens))
            error = relative_error(self.output[layer], truth)
            worst = error if not error <= worst else worst  # NaN stays
        return worst

    def timed(self, repeats: int) -> dict[str, Any]:
        """Median of replays of one graph of all layers, checked before and after."""
        self.run()
        before = self.error()
        graph = capture(self.run, DEVICE)
        samples = event_seconds(graph.replay, repeats=repeats, before=self.refresh)
        after = self.error()
        if not (before <= WORST_ERROR and after <= WORST_ERROR):
            raise SystemExit(f"{self.cache.name} at {self.end}: relative errors {before:.2e} and {after:.2e}")
        tokens = SHAPE.budget + self.end % SHAPE.ratio
        read = len(self.cache.layers) * tokens * self.cache.token_bytes
        median = statistics.median(samples)
        return {
            "format": self.cache.name, "end": self.end, "plan": vars(self.plan), **summary(samples),
            "link_bytes": read, "link_gb_per_s": read / median / 1e9, "error_before": before, "error_after": after,
        }  # fmt: skip


def cache_of(name: str, slabs: list[torch.Tensor], tokens: int) -> Plain | Coded:
    """Planes of `tokens` tokens of a format in the slabs, filled."""
    return Plain(slabs, tokens) if name == "fp16" else Coded(name, slabs, tokens)


def measured(name: str, slabs: list[torch.Tensor], ends: list[int], repeats: int) -> list[dict[str, Any]]:
    """All plans at all ends, in what one format makes of the slabs."""
    before = torch.cuda.memory_allocated(DEVICE)
    rows = []
    for end in ends:
        cache = cache_of(name, slabs, end + 1)
        for plan in PLANS if end == max(ends) else PLANS[:1]:
            torch.cuda.reset_peak_memory_stats(DEVICE)
            row = Decode(cache, end, plan).timed(repeats)
            row["vram_mib"] = (torch.cuda.max_memory_allocated(DEVICE) - before) / MIB
            rows.append(row)
            words = f"{row['median_s'] * 1e3:.4f} ms, {row['link_gb_per_s']:.1f} GB/s, {row['error_after']:.1e}"
            print(name, end, (plan.blocks_per_split, plan.num_warps), words, flush=True)
        del cache
    return rows


def correct(slabs: list[torch.Tensor], ends: list[int]) -> dict[str, dict[int, float]]:
    """Errors of every format at odd ends; a selection out of range must be refused."""
    found: dict[str, dict[int, float]] = {}
    for name in ("fp16", *BLOCK_FORMATS):
        for end in ends:
            decode = Decode(cache_of(name, slabs[:2], end), end, PLANS[0])
            decode.run()
            error = decode.error()
            found.setdefault(name, {})[end] = error
            if not error <= WORST_ERROR:
                raise SystemExit(f"{name} at {end}: relative error {error:.2e}")
        if isinstance(decode.cache, Coded):
            _refused(decode, decode.cache)
        print("correct", name, {end: f"{error:.1e}" for end, error in found[name].items()}, flush=True)
    return found


def _refused(decode: Decode, cache: Coded) -> None:
    decode.selected[0, 3] = SHAPE.blocks(decode.end)
    with contextlib.suppress(IndexError):
        gather_records(
            decode.query[0], cache.layers[0], decode.selected[0], decode.end, decode.output[0], decode.buffers, SHAPE,
            decode.plan, cache.reading,
        )  # fmt: skip
        raise SystemExit(f"{cache.name}: a block beyond the context was not refused")


def ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each format's best plan at each end over fp16's, in time and in bytes."""
    best: dict[tuple[str, int], dict[str, Any]] = {}
    for row in rows:
        key = (row["format"], row["end"])
        best[key] = min(best.get(key, row), row, key=lambda each: each["median_s"])
    return [
        {
            "format": name, "end": end, "plan": row["plan"], "median_s": row["median_s"],
            "of_fp16": row["median_s"] / best["fp16", end]["median_s"],
            "bytes_of_fp16": row["link_bytes"] / best["fp16", end]["link_bytes"],
        }
        for (name, end), row in best.items()
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
        for name in ("fp16", *BLOCK_FORMATS):
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
