"""Decode attention over bf16 and 8-bit caches on a real device: checked against float64 on fresh data, then timed.

PYTHONPATH=. python tests/gpu/format_suite_attend.py [--limit SECONDS] [--only WORD] [--out FILE]

Checks run in processes of their own, one a case, which also compiles what the timings need. Times are medians of a CUDA
graph that attends over 8 sequences' caches in turn (batch 1) or at once (batch 8), merging included; 131,072 tokens a
sequence, so that no cache is in L2 when its turn comes.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
import triton
import triton.language as tl
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

from realkernels.codecs.decode import FORMS
from realkernels.formats import format_named
from realkernels.kernels.split_kv import PlanCase, TilePlan, Workspace, alignment
from realkernels.timing import capture, event_seconds
from tests.realkernels.kernels.worlds import World, relative_error

CONTEXT = 131072
SEQUENCES = 8
LENGTHS = (4099, 1, 0, 777, 9001)
FRESH_PAGES = 64
"""Pages with values of their own; the rest of a cache repeats them."""
TOLERANCE = 4e-3
"""bf16 outputs: their rounding, and that of p."""
DEVICE = torch.device("cuda:0")
BEGUN = time.perf_counter()


@triton.jit
def _sum(x, out, block: tl.constexpr, steps: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block * steps + tl.arange(0, block)
    total = tl.zeros([block], tl.float32)
    for step in tl.static_range(steps):
        total += tl.load(x + at + step * block)
    tl.atomic_add(out, tl.sum(total, axis=0))


@dataclass(frozen=True)
class Case:
    """One kernel over one cache."""

    name: str
    arrangement: str = "aligned"
    q_tokens: int = 1
    kv_heads: int = 4
    head_dim: int = 256
    page_tokens: int = 256
    batches: tuple[int, ...] = (1, 8)
    plan: TilePlan | None = None
    """Where it is not the kernel's own."""

    def __str__(self) -> str:
        shape = f"{self.kv_heads} x {self.head_dim}"
        title = f"{self.name:20s} {self.arrangement:7s} q {self.q_tokens:<2d} {shape} page {self.page_tokens:<3d}"
        plan = self.plan
        return title + (f" {plan.tile} x {plan.rows} x {plan.sets}, {plan.num_warps} warps" if plan else "")

    @property
    def cache(self) -> tuple[str, str, int, int, int]:
        """Cases with the same are timed on one cache."""
        return self.name, self.arrangement, self.kv_heads, self.head_dim, self.page_tokens

    def tile_plan(self, views: dict[str, torch.Tensor]) -> TilePlan:
        """The plan asked for, or the kernel's own."""
        rows = 24 // self.kv_heads * self.q_tokens
        if self.plan is not None:
            return self.plan
        aligned = alignment(views["key_data"], views["value_data"])
        per_token = "key_scale" in views and views["key_scale"].dim() > 1
        sizes = {"q_rows": rows, "head_dim": self.head_dim, "aligned": aligned, "per_token": per_token}
        return FORMS[self.name].plan(PlanCase.on(DEVICE, **sizes))

    def workspace(self, plan: TilePlan, batch: int) -> Workspace:
        """For `batch` sequences at CONTEXT."""
        return plan.workspace(
            batch=batch, q_tokens=self.q_tokens, query_heads=24, kv_heads=self.kv_heads, head_dim=self.head_dim,
            tokens=CONTEXT, device=DEVICE,
        )  # fmt: skip

    def attend(  # noqa: PLR0917
        self, views: dict[str, torch.Tensor], query: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor,
        out: torch.Tensor, workspace: Workspace, plan: TilePlan,
    ) -> None:  # fmt: skip
        """One call."""
        FORMS[self.name].attend(
            query, views, table, lengths, out, workspace, plan=plan, page_tokens=self.page_tokens,
            softmax_scale=self.head_dim**-0.5,
        )  # fmt: skip


def cache(case: Case, pages: int) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    """Format, planes and views of a cache whose first pages are random and whose others repeat them."""
    form = format_named(case.name, arrangement=case.arrangement)
    planes = form.allocate(pages, case.page_tokens, case.kv_heads, case.head_dim, DEVICE)
    fresh = min(pages, FRESH_PAGES * 256 // case.page_tokens)
    rows = torch.randn(2, fresh * case.page_tokens, case.kv_heads, case.head_dim, device=DEVICE)
    rows *= torch.exp(0.5 * torch.randn(*rows.shape[:3], 1, device=DEVICE))
    form.append(planes, torch.arange(fresh * case.page_tokens, device=DEVICE), rows[0], rows[1])
    views = form.views(planes)
    for view in views.values():
        if view.shape[0] == pages:
            for first in range(fresh, pages, fresh):
                view[first : first + fresh] = view[: min(fresh, pages - first)]
    return form, planes, views


def check(case: Case) -> str:
    """Error against float64 over what the format reads back; compiles for both batch sizes of the timings."""
    try:
        error = error_of(case)
    except Exception as problem:  # noqa: BLE001
        return f"BAD {case} {type(problem).__name__} {str(problem)[:200]}"
    return f"{'ok ' if error < TOLERANCE else 'BAD'} {case} error {error:.1e}"


def error_of(case: Case) -> float:
    """The larger error of the numbers of splits that the timings use; NaN stays NaN."""
    world = World(
        lengths=LENGTHS, q_tokens=case.q_tokens, query_heads=24, kv_heads=case.kv_heads, head_dim=case.head_dim,
        page_tokens=case.page_tokens, dtype=torch.bfloat16, device="cuda:0",
    )  # fmt: skip
    form, planes, views = cache(case, world.pages)
    table = torch.zeros(len(LENGTHS), CONTEXT // case.page_tokens, dtype=torch.int32, device=DEVICE)
    table[:, : world.max_pages] = world.table()
    slots = torch.arange(world.pages * case.page_tokens, device=DEVICE)
    shape = (world.pages, case.page_tokens, case.kv_heads, case.head_dim)
    keys, values = (part.view(shape).transpose(1, 2) for part in form.read(planes, slots))
    query, lengths = world.query(), world.lengths_tensor()
    truth = world.truth(query, keys, values, table)
    plan, errors = case.tile_plan(views), []
    for batch in case.batches:
        splits = case.workspace(plan, batch).splits
        workspace = Workspace.allocate(
            batch=len(LENGTHS), q_tokens=case.q_tokens, query_heads=24, head_dim=case.head_dim, splits=splits,
            device=DEVICE,
        )  # fmt: skip
        workspace.partial.fill_(torch.nan)
        workspace.statistics.fill_(torch.nan)
        out = torch.full_like(query, torch.nan)
        case.attend(views, query, table, lengths, out, workspace, plan)
        errors.append(relative_error(out, truth))
    return float(torch.tensor(errors).max())


def graph_us(run: Callable[[], object], calls: int, repeats: int = 9) -> float:
    """Median microseconds of one of the `calls` calls that `run` makes."""
    graph = capture(run, DEVICE)
    return statistics.median(event_seconds(graph.replay, repeats=repeats, warm_up=2)) * 1e6 / calls


def read_rate() -> float:
    """GB/s of a sum over 4 GiB."""
    big, out = torch.empty(2**30, device=DEVICE).normal_(), torch.zeros(1, device=DEVICE)
    us = graph_us(lambda: _sum[(2**30 // 32768,)](big, out, block=4096, steps=8, num_warps=8), 1)
    return big.numel() * 4 / us * 1e-3


def time_case(case: Case, views: dict[str, torch.Tensor], table: torch.Tensor, rate: float) -> dict[str, Any]:
    """Times of a case, for all of its batch sizes."""
    query = torch.randn(SEQUENCES, case.q_tokens, 24, case.head_dim, device=DEVICE).bfloat16()
    out, lengths = torch.empty_like(query), torch.full((SEQUENCES,), CONTEXT, dtype=torch.int32, device=DEVICE)
    plan, times, said = case.tile_plan(views), {}, []
    for batch in case.batches:
        workspace = case.workspace(plan, batch)

        def run(batch: int = batch, workspace: Workspace = workspace) -> None:
            for first in range(0, SEQUENCES, batch):
                part = slice(first, first + batch)
                case.attend(views, query[part], table[part], lengths[part], out[part], workspace, plan)

        us = times[batch] = graph_us(run, SEQUENCES // batch)
        token_bytes = case.kv_heads * case.head_dim * 2 * (2 if case.name == "bf16" else 1)
        token_bytes += 8 * case.kv_heads if "per_token" in case.name else 0
        gb_s = token_bytes * CONTEXT * batch / us * 1e-3
        said.append(f"b{batch} {us:7.1f} us {gb_s:5.0f} GB/s {100 * gb_s / rate:3.0f} % ({workspace.splits} splits)")
    print(f"{case}: {'   '.join(said)}  [{time.perf_counter() - BEGUN:.0f} s]", flush=True)
    return {**asdict(case), "us": times}


def flash(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The fastest back end of torch here: cuDNN took 173 and 1,255 us where this took 150 and 940."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(query, keys, values, enable_gqa=True)


def flexible(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Any:
    """Attention of torch that is compiled to Triton."""
    return torch.compile(flex_attention, dynamic=False)(query, keys, values, enable_gqa=True)


def warm_flexible(batches: tuple[int, ...] = (1, 8)) -> str:
    """Leaves its kernels in the compiler's cache on disk."""
    try:
        for batch in batches:
            keys = torch.zeros(batch, CONTEXT, 4, 256, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2)
            flexible(torch.zeros(batch, 24, 1, 256, device=DEVICE, dtype=torch.bfloat16), keys, keys)
    except Exception as problem:  # noqa: BLE001
        return f"flex: {str(problem)[:200]}"
    return "ok  flex compiles"


def libraries() -> dict[str, float]:
    """Times of torch's own attention over bf16 caches of the main shape, contiguous, without pages."""
    keys, values = (torch.randn(SEQUENCES, CONTEXT, 4, 256, device=DEVICE).bfloat16().transpose(1, 2) for _ in "kv")
    query, taken = torch.randn(SEQUENCES, 24, 1, 256, device=DEVICE).bfloat16(), {}
    for way in (flash, flexible):
        for batch in (1, 8):
            parts = [slice(first, first + batch) for first in range(0, SEQUENCES, batch)]

            def run(way: Callable[..., Any] = way, parts: list[slice] = parts) -> None:
                for part in parts:
                    way(query[part], keys[part], values[part])

            try:
                us = taken[f"{way.__name__}_b{batch}"] = graph_us(run, len(parts))
            except Exception as problem:  # noqa: BLE001
                print(f"{way.__name__} batch {batch}: {str(problem)[:200]}", flush=True)
            else:
                print(f"{way.__name__} batch {batch}: {us:.1f} us [{time.perf_counter() - BEGUN:.0f} s]", flush=True)
    return taken


def cases() -> list[Case]:
    """The table of the targets first, then what else there is to know."""
    int8, fp8 = "int8_per_token_head", "fp8_per_token_head"
    made = [Case(name, q_tokens=q) for name in ("bf16", int8, fp8, "fp8") for q in (1, 8)]
    made += [Case(int8, "inline", q_tokens=q) for q in (1, 8)]
    made += [Case(int8, q_tokens=q, batches=(1,)) for q in (2, 4, 16, 32)]
    made += [Case("bf16", q_tokens=q, batches=(1,)) for q in (4, 16)]
    for tile, warps, wide in ((128, 8, True), (128, 4, False)):
        made.append(
            Case(
                int8, q_tokens=8,
                plan=TilePlan(tile=tile, rows=16, sets=3, num_warps=warps, stages=3, per_multiprocessor=1, wide=wide),
            )
        )  # fmt: skip
    made += [Case(int8, kv_heads=2, batches=(1,)), Case(int8, kv_heads=8, head_dim=128, batches=(1,))]
    made += [Case(name, page_tokens=16, batches=(1,)) for name in ("bf16", int8)]
    return made


def main() -> None:
    """Check, then time, grouped by cache, until the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=float, default=600.0)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    chosen = [case for case in cases() if asked.only in str(case)]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        warm = pool.submit(warm_flexible)
        for line in pool.map(check, chosen):
            print(line, flush=True)
        print(warm.result(), flush=True)
    rate = read_rate()
    print(f"{torch.cuda.get_device_name()}: reads {rate:.0f} GB/s [{time.perf_counter() - BEGUN:.0f} s]", flush=True)
    taken, rows = libraries(), []
    for key in dict.fromkeys(case.cache for case in chosen):
        if time.perf_counter() - BEGUN > asked.limit:
            print("out of time", flush=True)
            break
        mine = [case for case in chosen if case.cache == key]
        pages = SEQUENCES * CONTEXT // mine[0].page_tokens
        kept = cache(mine[0], pages)
        table = torch.randperm(pages, device=DEVICE).int().view(SEQUENCES, -1)
        rows += [time_case(case, kept[2], table, rate) for case in mine]
        del kept
        torch.cuda.empty_cache()
    if asked.out is not None:
        asked.out.write_text(json.dumps({"read_gb_s": rate, "libraries_us": taken, "cases": rows}, indent=1))


if __name__ == "__main__":
    main()
