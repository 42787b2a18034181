"""Every kernel once, on odd small sizes: against float64, eagerly and from a graph; made for compute-sanitizer too.

    python tests/gpu/every_kernel.py report.json                    # compiles, and checks the results
    compute-sanitizer --tool memcheck --kernel-name-exclude kns=_Z python tests/gpu/every_kernel.py --run-only
    compute-sanitizer --tool racecheck python tests/gpu/every_kernel.py --run-only --tiers vram --codecs none
    compute-sanitizer --tool initcheck python tests/gpu/every_kernel.py --run-only --tiers vram --codecs none

Of exllamav3's formats those that have every number of bits once for K and once for V. Names that begin with _Z are
torch's own kernels; under the checker each costs milliseconds, hence `--run-only`, which leaves the truth to the first
command. Several runs side by side, each with some of the `--codecs`, share the device well. `--planted` launches one
kernel that writes beyond a tensor and nothing else: the checker must find it. Tensors must be allocated one by one for
the checker to see their ends, hence PYTORCH_NO_CUDA_MEMORY_CACHING below. Exits with 1 if a result is wrong.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if {"--run-only", "--planted"} & set(sys.argv):  # otherwise graphs are captured, which takes a cache
    os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).parents[2]))

from realkernels.caches.interleaved import BLOCK_CODECS, interleaved_cache
from realkernels.caches.qsa import QsaCache, Tier, qsa_cache
from realkernels.codecs import Arrangement, arrangements, codec_names
from realkernels.device import Device, open_device
from realkernels.shape import DenseShape, QsaShape
from realkernels.timed import library, sparse
from realkernels.timed.append import Append
from realkernels.timed.attend_decode import AttendDecode, attended
from realkernels.timed.compile_ahead import Wanted, compile_ahead
from realkernels.timed.page_images import EvictPages, RestorePages
from realkernels.timed.prefill import AttendChunk
from realkernels.timed.sparse import GatherBlocks

SMALL = QsaShape(layers=2, query_heads=6, kv_heads=2, head_dim=64, index_heads=3, index_dim=32, budget=64)
FULL = QsaShape()
DENSE = DenseShape(hidden=384, query_heads=6, kv_heads=2, head_dim=64, intermediate=1096)
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
CODEC_TOLERANCE = 2e-2
DECODED = ((1, 1, 1), (301, 2, 1), (517, 1, 8), (1_000, 3, 2), (4_099, 1, 8))
"""Context, batch, query tokens."""

APPENDED = ((1, 0), (7, 125), (300, 3))
"""Tokens, tokens before them."""

PREFILLED = ((1, 0, 512), (5, 0, 256), (70, 444, 256), (777, 523, 256), (32, 8_969, 8_192))
"""Query tokens, tokens before them, tokens that are dequantised at once."""

Named = Iterator[tuple[str, Any, float]]
"""What it is, the call, and its tolerance."""


def covering() -> list[str]:
    """Names of formats that together reach every kernel, and of exllamav3's every number of bits of either plane."""
    others = [name for name in codec_names() if not name.startswith("exl3_")]
    bits = ((4, 4), (4, 8), (8, 4), (8, 8), (2, 3), (3, 2), (5, 6), (6, 7), (7, 5))
    return others + [f"exl3_k{k}v{v}" for k, v in bits]


def of_codec(name: str, arrangement: Arrangement, device: torch.device) -> Named:
    """Append, decode and prefill over caches of a codec."""
    given: dict[str, Any] = {"arrangement": arrangement, "device": device}
    for tokens, past in APPENDED:
        yield f"append of {tokens} at {past}", Append(name, tokens=tokens, past_tokens=past, layers=1, **given), 1.0
    if name not in attended():
        return
    for ctx, batch, q_tokens in DECODED:
        made = AttendDecode(name, ctx_tokens=ctx, batch=batch, q_tokens=q_tokens, caches=2, **given)
        yield f"decode of {q_tokens} at {batch} x {ctx}", made, CODEC_TOLERANCE
    for q_tokens, past, chunk in PREFILLED:
        made = AttendChunk(
            name, q_tokens=q_tokens, ctx_tokens=q_tokens + past, kv_chunk_tokens=chunk, caches=1, **given
        )
        yield f"prefill of {q_tokens} at {past}", made, CODEC_TOLERANCE


def of_cache(cache: QsaCache) -> Named:
    """Append, decode, prefill in every mode, and page images over planes of sparse attention."""
    shape, tokens, allowed = cache.shape, cache.tokens, TOLERANCE[cache.dtype]
    for rows, past in ((1, tokens - 1), (3, 2), (7, tokens - 9)):
        planes = (cache.keys[1], cache.values[1], cache.raw_keys[1])
        cache.append(1, past, *(torch.randn(rows, *p.shape[1:], device=p.device).to(p.dtype) for p in planes))
    for ctx_tokens in sorted({tokens, tokens - 1, shape.budget + 3}):
        for kind in (sparse.DecodeSelect, sparse.DecodeGather, sparse.DecodeStep):
            yield f"{kind.__name__} at {ctx_tokens}", kind(cache, ctx_tokens=ctx_tokens), allowed
    for past in (0, shape.budget - 3, tokens - 5):
        size = {"ctx_tokens": past + 5, "q_tokens": 5}
        yield f"PrefillSelect at {past}", sparse.PrefillSelect(cache, **size), 0.0
        for bucket, copies in ((0, "serial"), (12, "serial"), (100, "overlapped"), (4096, "overlapped")):
            if bucket != 12 or shape is not FULL:  # hundreds of buckets, nothing new
                call = sparse.PrefillAttend(cache, **size, bucket_tokens=bucket, copies=copies)
                yield f"PrefillAttend at {past}, {bucket} {copies}", call, allowed
    for images in (EvictPages, RestorePages):
        yield images.__name__, images(cache, pages=-(-tokens // 256)), 0.0


def of_sparse(tiers: list[Tier], device: torch.device) -> Named:
    """Over planes, in both types and tiers, and over interleaved blocks."""
    for dtype in TOLERANCE:
        for tier in tiers:
            for shape, tokens in ((SMALL, 203), (SMALL, 67), (FULL, 2051), (FULL, 5003)):
                with qsa_cache(shape, layers=2, tokens=tokens, tier=tier, device=device, dtype=dtype) as cache:
                    cache.fill_random(1)
                    for what, call, allowed in of_cache(cache):
                        yield f"{tier} {dtype} {shape.budget} of {tokens}: {what}", call, allowed
    for name in BLOCK_CODECS if "host" in tiers else ():
        with interleaved_cache(name, shape=FULL, layers=2, tokens=2_307, device=device) as cache:
            for ctx_tokens in (2_048, 2_307):
                yield f"blocks of {name} at {ctx_tokens}", GatherBlocks(cache, ctx_tokens=ctx_tokens), CODEC_TOLERANCE


def of_library(device: torch.device) -> Named:
    """The kernels of a dense layer."""
    given: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    for tokens in (1, 37):
        yield f"elementwise of {tokens}", library.Elementwise(DENSE, tokens=tokens, layers=2, **given), CODEC_TOLERANCE
        yield f"plain append of {tokens}", library.PlainAppend(DENSE, tokens=tokens, layers=2, **given), 0.0
    past = 101 if library.has_lower_right(device) else 0
    layers = library.DenseLayers(DENSE, layers=2, batch=1, q_tokens=37, past_tokens=past, **given)
    yield "dense layers", layers, 3 * CODEC_TOLERANCE


def wrong(call: Any, allowed: float, device: Device, *, run_only: bool) -> str:
    """Empty, or what is wrong with the results of a run, and of a replay."""
    if run_only:
        call.poison()
        call.run()
        return "" if call.finite() else "not finite"
    found = call.verify()
    if not found <= allowed:
        return f"error {found:.1e}"
    if not call.capturable:
        return ""
    replay = device.capture(call.run)
    call.poison()
    replay()
    found = call.error()
    return "" if found <= allowed else f"error {found:.1e} from a graph"


@triton.jit
def beyond_the_end(numbers, count):
    """Write one number more than there are."""
    tl.store(numbers + count, 1.0)


def main() -> int:
    """0 if every result was right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", nargs="?", type=Path)
    parser.add_argument("--codecs", default=",".join(covering()), help="or none")
    parser.add_argument("--tiers", default="vram,host", help="of sparse planes; host needs memory that can be locked")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--run-only", action="store_true", help="run every kernel, leave the results to another run")
    parser.add_argument("--planted", action="store_true", help="write beyond the end of a tensor, and nothing else")
    asked = parser.parse_args()
    device = open_device(asked.device)
    if asked.planted:
        numbers = torch.zeros(128, device=device.device)  # 512 B: a device's memory is given out in such pieces
        beyond_the_end[(1,)](numbers, numbers.numel())
        torch.cuda.synchronize()
        return 0
    names = [] if asked.codecs == "none" else asked.codecs.split(",")
    pairs = [(name, arrangement) for name in names for arrangement in arrangements(name)]
    if device.name == "cuda" and "CUDA_INJECTION64_PATH" not in os.environ:  # a checker would follow the compilers, too
        tokens = sorted({q_tokens for _, _, q_tokens in DECODED})
        ahead = [Wanted(*pair, q_tokens) for pair in pairs if pair[0] in attended() for q_tokens in tokens]
        print(*compile_ahead(ahead, device=str(device.device)), sep="\n")
    groups = {"sparse": of_sparse([tier for tier in asked.tiers.split(",") if tier], device.device)}
    groups["library"] = of_library(device.device)
    groups |= {f"{name} {arrangement}": of_codec(name, arrangement, device.device) for name, arrangement in pairs}
    report: dict[str, list[str]] = {}
    for group, calls in groups.items():
        report[group] = []
        for what, call, allowed in calls:
            faults = wrong(call, allowed, device, run_only=asked.run_only)
            report[group] += [f"{what}: {faults}"] if faults else []
        print(group, *(report[group] or ["ran" if asked.run_only else "right"]), sep="  ", flush=True)
    if asked.report is not None:
        asked.report.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return int(any(report.values()))


if __name__ == "__main__":
    sys.exit(main())
