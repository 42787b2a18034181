"""Decode attention over 4-bit and coded caches on a real device: checked against float64 on fresh data, then timed.

PYTHONPATH=. python tests/gpu/nibble_suite.py [--limit SECONDS] [--only WORD]

Checks run in processes of their own, which compile what the timings need. Times are medians of a CUDA graph that
attends over 8 sequences' caches in turn (batch 1) or at once (batch 8), merging included; 131,072 tokens a sequence,
so that no cache is in L2 when its turn comes. Beside them bf16 in the same run.
"""

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import torch
import triton
import triton.language as tl

from realkernels.codecs.decode.groups import iq4_nl, q5_1
from realkernels.kernels.arithmetic import centred_code, odd_polynomial, scaled_code, tiny_code
from tests.gpu.nibble_cases import CONTEXT, DEVICE, SEQUENCES, Case
from tests.realkernels.kernels.worlds import World

LENGTHS = (4099, 1, 0, 777, 9001, 5)


@triton.jit
def _decode_all(words, scales, out, KIND: tl.constexpr, NUMBER: tl.constexpr, ASM: tl.constexpr):  # noqa: N803, PLR0917
    at = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    w, scale = tl.load(words + at), tl.load(scales + at)
    if KIND == 0:
        x = tiny_code(w, NUMBER, 4, ASM)
    elif KIND == 1:
        x = tiny_code(w, NUMBER, 8, ASM)
    elif KIND == 2:
        x = scaled_code(w, scale, NUMBER, 4, 8.0, 0, ASM)
    elif KIND == 3:
        x = scaled_code(w, scale, NUMBER, 4, 7.5, 0, ASM)
    elif KIND == 4:
        x = scaled_code(w, scale, NUMBER, 2, 127.5, 0, ASM)
    elif KIND == 5:
        x = scaled_code(w, scale, NUMBER, 2, 128.0, 128, ASM)
    elif KIND == 6:
        x = centred_code(w, NUMBER, ASM)
    elif KIND == 8:
        x = iq4_nl(w, scale, NUMBER, ASM)
    elif KIND == 9:
        x = q5_1(w, (scale, -12 * scale, (w >> NUMBER) & 15), NUMBER, ASM)
    else:
        x = odd_polynomial(w, NUMBER, 0.050140380859375, 0.045318603515625, ASM)
    tl.store(out + at, x)


def decoders_agree() -> str:
    """Assembly and plain Triton give the same bits for every word."""
    words = torch.arange(-(2**15), 2**15, device=DEVICE).short()
    scales, wrong = (0.2 * torch.exp(torch.randn(2**16, device=DEVICE))).half(), []
    for kind, numbers in enumerate((4, 8, 4, 4, 2, 2, 4, 4, 4, 4)):
        for number in range(numbers):
            both = [torch.full((2**16,), torch.nan, dtype=torch.float16, device=DEVICE) for _ in range(2)]
            for assembly, out in zip((True, False), both, strict=True):
                _decode_all[(64,)](words, scales, out, kind, number, assembly)
            if not torch.equal(both[0].view(torch.int16), both[1].view(torch.int16)):
                wrong.append((kind, number))
    return f"decoders: {'differ for ' + str(wrong) if wrong else 'the same bits'}"


def check(job: tuple[str, str, World]) -> str:
    """Fresh data, the whole path, twice: eagerly and from a graph."""
    name, arrangement, world = job
    try:
        case = Case(name, arrangement, world)
        case.append()
        query, lengths = world.query(seed=time.time_ns() % 2**31), world.lengths_tensor()
        outs = [torch.full_like(query, torch.nan) for _ in range(2)]
        workspace = case.workspace(query, splits=5)
        case.attend(query, case.table, lengths, outs[0], workspace)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            case.attend(query, case.table, lengths, outs[1], workspace)
        graph.replay()
        error = case.error(query, outs[0], case.read())
        rounding = 2e-3 if world.dtype is torch.bfloat16 else 0.0
        fine = error < case.tolerance + rounding and torch.equal(*outs)
    except Exception as wrong:  # noqa: BLE001 - one case must not end the run
        return f"WRONG {name} {arrangement} {world}: {type(wrong).__name__} {str(wrong)[:300]}"
    words = f"{name} {arrangement} {world.query_heads}/{world.kv_heads}x{world.head_dim} q{world.q_tokens}"
    return f"{'' if fine else 'WRONG '}{words} page {world.page_tokens}: {error:.1e}"


def checks() -> Iterator[tuple[str, str, World]]:
    dense = World(lengths=LENGTHS, query_heads=24, kv_heads=4, head_dim=256, page_tokens=256, device="cuda")
    sparse = replace(dense, kv_heads=2, page_tokens=128, dtype=torch.bfloat16)
    names = ("int4_per_token_head", "q4_0", "exl3_k4v4", "turboquant_4bit_nc", "kvarn_k4v2_g128")
    for name in names:
        arrangement = "aligned"
        yield from ((name, arrangement, replace(dense, q_tokens=q)) for q in (1, 8))
        yield name, arrangement, sparse
    yield from (("int4_per_token_head", "inline", replace(dense, q_tokens=q)) for q in (2, 3))
    yield from ((name, "inline", dense) for name in ("q4_0", "q8_0", "turboquant_4bit_nc"))
    yield "int4_per_token_head", "aligned", replace(dense, q_tokens=32)
    yield "int4_per_token_head", "aligned", replace(dense, query_heads=8, head_dim=128, page_tokens=64)
    yield from ((name, "aligned", dense) for name in ("exl3_k8v8", "exl3_k8v4", "q8_0", "kvarn_k4v4_g128"))
    yield "kvarn_k4v2_g64", "aligned", replace(dense, page_tokens=128, q_tokens=2)


def median_us(call: Callable[[int], None], calls: int) -> float:
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(calls):
            call(number)
    graph.replay()
    times = []
    for _ in range(11):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(200_000)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


def timings(name: str, base: dict[tuple[int, int], float]) -> str:
    """Microseconds at batch 1 and 8, one and eight query tokens, and how many times faster than bf16."""
    shape = {"query_heads": 24, "kv_heads": 4, "head_dim": 256, "page_tokens": 256}
    world = World(lengths=(CONTEXT,) * SEQUENCES, **shape, dtype=torch.bfloat16, device="cuda")
    case = Case(name, "aligned", world)
    case.fill()
    seen = case.read()
    parts = [f"{name:20s}"]
    for q_tokens in (1, 8):
        case.world = replace(world, q_tokens=q_tokens)
        query, lengths = 3 * case.world.query(seed=time.time_ns() % 2**31), world.lengths_tensor()
        out = torch.full_like(query, torch.nan)
        case.attend(query, case.table, lengths, out, case.workspace(query))
        error = case.error(query, out, seen)
        for batch in (1, 8):
            us, splits = timed(case, query, lengths, batch)
            base.setdefault((q_tokens, batch), us)
            parts.append(f"q{q_tokens} b{batch} {us:7.1f} us {base[q_tokens, batch] / us:4.2f}x ({splits})")
        parts.append(f"error {error:.1e}")
    return "  ".join(parts)


def timed(case: Case, query: torch.Tensor, lengths: torch.Tensor, batch: int) -> tuple[float, int]:
    """Microseconds of a call, splits."""
    rows = [slice(row, row + batch) for row in range(0, SEQUENCES, batch)]
    workspace, out = case.workspace(query[rows[0]]), torch.empty_like(query)

    def call(number: int) -> None:
        part = rows[number % len(rows)]
        case.attend(query[part], case.table[part], lengths[part], out[part], workspace)

    return median_us(call, 16 if batch == 1 else 4), workspace.splits


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--limit", type=float, default=300.0)
    options.add_argument("--only", default="")
    given, began = options.parse_args(), time.monotonic()
    jobs = [job for job in checks() if given.only in job[0]]
    with ProcessPoolExecutor(15, mp_context=multiprocessing.get_context("spawn")) as pool:
        for line in pool.map(check, jobs):
            print(line, flush=True)
    print(decoders_agree(), f"{time.monotonic() - began:.0f} s", flush=True)
    base: dict[tuple[int, int], float] = {}
    names = ("int4_per_token_head", "exl3_k4v4", "q4_0", "kvarn_k4v2_g128", "turboquant_4bit_nc", "exl3_k8v8", "q8_0")
    for name in ("bf16", *(name for name in names if given.only in name)):
        if time.monotonic() - began > given.limit:
            print("out of time")
            break
        print(timings(name, base), f"{time.monotonic() - began:.0f} s", flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
