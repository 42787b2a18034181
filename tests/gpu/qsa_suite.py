"""The sparse-offload kernels on a real device: checked against float64 on fresh data, timed, checked again."""

import argparse
import contextlib
import json
import platform
import statistics
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from realkernels.gather import GatherBuffers, GatherPlan, gather_attend
from realkernels.host_slab import host_slab
from realkernels.prefill import PrefillBuffers, Staging, attend_bucket, attend_in_place, bucket_bounds, select_rows
from realkernels.selection import SelectionBuffers, select_blocks
from realkernels.timing import capture, event_seconds

from realkernels import reference
from realkernels.shape import QsaShape

SHAPE = QsaShape()
DEVICE = torch.device("cuda:0")
HALF = torch.float16
MIB = 2**20


def summary(samples: list[float]) -> dict[str, Any]:
    """Median, spread and number of samples, in seconds."""
    return {
        "median_s": statistics.median(samples),
        "min_s": min(samples),
        "max_s": max(samples),
        "n": len(samples),
    }


def relative_error(output: torch.Tensor, truth: torch.Tensor) -> float:
    """Norm of the difference over the norm of the truth; NaN stays NaN."""
    return float((output.double() - truth).norm() / truth.norm())


@contextlib.contextmanager
def planes(layers: int, tokens: int, tier: str) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """K and V of each layer with random values, [tokens, kv_heads, head_dim], in VRAM or registered host memory."""
    size = (tokens, SHAPE.kv_heads, SHAPE.head_dim)
    with contextlib.ExitStack() as stack:
        made = []
        for _ in range(layers):
            if tier == "vram":
                both = torch.empty(2, *size, dtype=HALF, device=DEVICE)
            else:
                count = 2 * tokens * SHAPE.kv_heads * SHAPE.head_dim * 2
                slab = stack.enter_context(host_slab(count, device=DEVICE))
                both = slab.device.view(HALF).view(2, *size)
            for plane in both:
                for part in plane.split(65536):
                    part.copy_(torch.randn(part.shape, dtype=HALF, device=DEVICE))
            made.append((both[0], both[1]))
        torch.cuda.synchronize()
        yield made
        del made, both
        torch.cuda.empty_cache()


def decode_gather(layers: int, tokens: int, tier: str, plans: list[GatherPlan], repeats: int) -> list[dict[str, Any]]:
    """The whole gather step of all layers in one graph, with fresh selections before every replay."""
    rows = []
    end = tokens - 1  # an open tail of 3 tokens
    with planes(layers, tokens, tier) as cache:
        query = torch.randn(layers, SHAPE.query_heads, SHAPE.head_dim, dtype=HALF, device=DEVICE)
        selected = torch.empty(layers, SHAPE.topk, dtype=torch.int32, device=DEVICE)
        output = torch.empty_like(query)

        def refresh(_index: int = 0) -> None:
            for layer in range(layers):
                picks = torch.randint(SHAPE.blocks(end), (2 * SHAPE.topk,), device=DEVICE).unique()[: SHAPE.topk]
                selected[layer] = picks[torch.randperm(SHAPE.topk, device=DEVICE)].int()
            output.fill_(float("nan"))

        def verify() -> float:
            torch.cuda.synchronize()
            worst = 0.0
            for layer, (keys, values) in enumerate(cache):
                tokens_read = reference.selected_tokens(selected[layer].long(), end, SHAPE.ratio)
                truth = reference.attend(query[layer], keys[tokens_read], values[tokens_read])
                worst = max(worst, relative_error(output[layer], truth))
            return worst

        for plan in plans:
            buffers = GatherBuffers.allocate(SHAPE, plan, DEVICE)

            def step(plan: GatherPlan = plan, buffers: GatherBuffers = buffers) -> None:
                for layer, (keys, values) in enumerate(cache):
                    gather_attend(query[layer], keys, values, selected[layer], end, output[layer], buffers, SHAPE, plan)

            refresh()
            step()
            before = verify()
            graph = capture(step, DEVICE)
            samples = event_seconds(graph.replay, repeats=repeats, before=refresh)
            row = {"tier": tier, "tokens": tokens, "plan": vars(plan), **summary(samples)}
            row |= {"error_before": before, "error_after": verify()}
            rows.append(row)
            print("gather", tier, tokens, vars(plan), f"{row['median_s'] * 1e3:.3f} ms", f"{row['error_after']:.1e}")
    return rows


def decode_selection(layers: int, tokens: int, programs: list[int], repeats: int) -> list[dict[str, Any]]:
    """Selection of all layers in one graph; the set must be exactly the reference's on the kernel's own scores."""
    rows = []
    blocks = SHAPE.blocks(tokens)
    pooled = [torch.randn(blocks, SHAPE.index_dim, dtype=HALF, device=DEVICE) for _ in range(layers)]
    query = torch.randn(layers, SHAPE.index_heads, SHAPE.index_dim, dtype=HALF, device=DEVICE)
    selected = torch.empty(layers, SHAPE.topk, dtype=torch.int32, device=DEVICE)
    buffers = SelectionBuffers.allocate(blocks, DEVICE)

    def exact() -> bool:
        torch.cuda.synchronize()
        same = True
        for layer in range(layers):
            select_blocks(query[layer], pooled[layer], selected[layer], buffers, SHAPE, programs=programs[0])
            truth = reference.select_blocks(buffers.scores, SHAPE.topk)
            same &= torch.equal(selected[layer].long().sort().values, truth)
            scores = reference.block_scores(query[layer], pooled[layer])
            same &= bool((buffers.scores.double() - scores).abs().max() < 1e-4)
        return same

    for count in programs:

        def step(count: int = count) -> None:
            for layer in range(layers):
                select_blocks(query[layer], pooled[layer], selected[layer], buffers, SHAPE, programs=count)

        def refresh(_index: int) -> None:
            query.normal_()
            selected.fill_(-1)

        step()
        before = exact()
        graph = capture(step, DEVICE)
        samples = [seconds / layers for seconds in event_seconds(graph.replay, repeats=repeats, before=refresh)]
        after = selected.clone()
        row = {"tokens": tokens, "programs": count, **summary(samples), "exact_before": before, "exact_after": exact()}
        row["replayed_equals_eager"] = bool((after.sort(dim=1).values == selected.sort(dim=1).values).all())
        rows.append(row)
        print("select", tokens, count, f"{row['median_s'] * 1e6:.1f} us a layer", row["exact_after"])
    return rows


def staged_prefill(
    tokens: int, rows: int, bucket_tokens: int, tiles: list[tuple[int, int]], repeats: int
) -> dict[str, Any]:
    """One chunk of one layer at the end of `tokens`: copies alone, kernels alone, serial, overlapped, in place."""
    past = tokens - rows
    result: dict[str, Any] = {"tokens": tokens, "rows": rows, "bucket_tokens": bucket_tokens}
    with planes(1, tokens, "host") as cache:
        keys, values = cache[0]
        index = torch.randn(rows, SHAPE.index_heads, SHAPE.index_dim, dtype=HALF, device=DEVICE)
        pooled = torch.randn(SHAPE.blocks(tokens), SHAPE.index_dim, dtype=HALF, device=DEVICE)
        result["select"] = summary(
            event_seconds(lambda: select_rows(index, pooled, past, SHAPE), repeats=repeats, warm_up=1)
        )
        selection = select_rows(index, pooled, past, SHAPE)
        query = torch.randn(rows, SHAPE.query_heads, SHAPE.head_dim, dtype=HALF, device=DEVICE)
        output = torch.full_like(query, float("nan"))
        buffers = PrefillBuffers.allocate(rows, SHAPE, DEVICE)
        host = [plane.view(torch.uint8) for plane in cache[0]]
        del host

        def check() -> float:
            torch.cuda.synchronize()
            worst = 0.0
            for row in torch.randint(rows, (16,)).tolist():
                blocks = selection[row, :-1].long()
                truth = reference.sparse_attend(query[row], keys, values, blocks, past + row + 1, SHAPE)
                worst = max(worst, relative_error(output[row], truth))
            output.fill_(float("nan"))
            return worst

        for copies in ("serial", "overlapped"):
            staging = Staging(bucket_tokens=bucket_tokens, shape=SHAPE, dtype=HALF, device=DEVICE, copies=copies)
            run = lambda: staging.attend(query, keys, values, selection, past, output, buffers)  # noqa: E731, B023
            moved = run()
            error = check()
            samples = event_seconds(run, repeats=repeats)
            result[copies] = {**summary(samples), "bytes": moved, "error_before": error, "error_after": check()}
            print("staged", copies, f"{result[copies]['median_s'] * 1e3:.3f} ms", moved, result[copies]["error_after"])
        buckets = staging.buckets(tokens)

        def copy_all() -> None:
            for bucket in range(buckets):
                part = slice(bucket * bucket_tokens, min((bucket + 1) * bucket_tokens, tokens))
                count = part.stop - part.start
                staging.buffers[0][0][:count].copy_(keys[part], non_blocking=True)
                staging.buffers[0][1][:count].copy_(values[part], non_blocking=True)

        result["copy_alone"] = summary(event_seconds(copy_all, repeats=repeats))
        bounds = bucket_bounds(selection, bucket_tokens // SHAPE.ratio, buckets)
        for tile, warps in tiles:

            def compute_all(tile: int = tile, warps: int = warps) -> None:
                for bucket in range(buckets):
                    attend_bucket(
                        query, *staging.buffers[0], selection, bounds, bucket, bucket * bucket_tokens, past, output,
                        buffers, SHAPE, tile=tile, num_warps=warps,
                    )  # fmt: skip

            key = f"compute_alone_{tile}_{warps}"
            result[key] = summary(event_seconds(compute_all, repeats=repeats))
            print("staged", key, f"{result[key]['median_s'] * 1e3:.3f} ms")
        run = lambda: attend_in_place(query, keys, values, selection, past, output, SHAPE)  # noqa: E731
        result["in_place_host"] = summary(event_seconds(run, repeats=3, warm_up=1)) | {"error": check()}
        for name in ("copy_alone", "in_place_host", "select"):
            print("staged", name, f"{result[name]['median_s'] * 1e3:.3f} ms")
    return result


def machine() -> dict[str, str]:
    """What the figures were measured on."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,pcie.link.gen.current,pcie.link.width.current",
             "--format=csv,noheader"]  # fmt: skip
    line = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return {"gpu": line, "torch": torch.__version__, "python": platform.python_version()}


def main() -> None:
    """Run all parts and write one JSON file, after each part, so that nothing is lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path)
    parser.add_argument("--tokens", type=int, default=2**20)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--parts", default="select,gather_vram,gather_host,staged")
    parser.add_argument("--repeats", type=int, default=20)
    asked = parser.parse_args()
    plans = [GatherPlan(blocks_per_split=b, num_warps=w) for b, w in ((4, 4), (8, 4), (8, 8), (16, 8))]
    parts: dict[str, Callable[[], Any]] = {
        "select": lambda: [
            *decode_selection(asked.layers, asked.tokens, [132, 264, 528], asked.repeats),
            *decode_selection(asked.layers, 3 * asked.tokens, [264, 528], asked.repeats),
        ],
        "gather_vram": lambda: decode_gather(asked.layers, asked.tokens, "vram", plans, asked.repeats),
        "gather_host": lambda: decode_gather(asked.layers, asked.tokens, "host", plans, asked.repeats),
        "staged": lambda: staged_prefill(
            asked.tokens // 8, 4096, 16384, [(32, 4), (64, 4), (64, 8), (128, 8)], asked.repeats
        ),
    }
    report: dict[str, Any] = {"machine": machine()}
    for name in asked.parts.split(","):
        report[name] = parts[name]()
        asked.report.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
