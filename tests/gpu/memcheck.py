"""Every kernel once, on odd small sizes and checked: made for compute-sanitizer.

    compute-sanitizer --tool memcheck python tests/gpu/memcheck.py
    compute-sanitizer --tool racecheck python tests/gpu/memcheck.py --tiers vram
    compute-sanitizer --tool initcheck python tests/gpu/memcheck.py --tiers vram

Tensors must be allocated one by one for the checker to see their ends, hence PYTORCH_NO_CUDA_MEMORY_CACHING below.
Exits with 1 if a result is wrong, whether or not the checker found anything.
"""

import argparse
import os
import sys

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import torch
from realkernels.backend import Backend, Tier
from realkernels.triton_backend import TritonBackend

from realkernels import page_images
from realkernels.shape import QsaShape

SMALL = QsaShape(layers=2, query_heads=6, kv_heads=2, head_dim=64, index_heads=3, index_dim=32, budget=64)
FULL = QsaShape()
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def one_cache(made: Backend, shape: QsaShape, *, tokens: int, tier: Tier) -> list[str]:
    """What went wrong for one cache: append, selection, gather, prefill in every mode, page images."""
    wrong = []
    allowed = TOLERANCE[made.dtype]
    with made.cache(shape, layers=2, tokens=tokens, tier=tier) as cache:
        cache.fill_random(1)
        for rows, past in ((1, tokens - 1), (3, 2), (7, tokens - 9)):
            planes = (cache.keys[1], cache.values[1], cache.raw_keys[1])
            cache.append(1, past, *[torch.randn(rows, *p.shape[1:], device=p.device).to(p.dtype) for p in planes])
        for end in {tokens, tokens - 1, shape.budget + 3}:
            step = made.decode_step(cache, end=end)
            step.run()
            exact, error = step.verify()
            if not exact or not error < allowed:
                wrong.append(f"decode at {end}: exact {exact}, error {error:.1e}")
        rows = 5
        for past in (0, shape.budget - 3, tokens - rows):
            for mode, bucket_tokens, copies in (
                ("in_place", 0, "serial"), ("staged", 12, "serial"), ("staged", 100, "overlapped"),
                ("staged", 4096, "overlapped"),
            ):  # fmt: skip
                if bucket_tokens == 12 and shape is FULL:
                    continue  # hundreds of buckets, nothing new
                chunk = made.prefill_chunk(
                    cache, layer=1, past=past, rows=rows, mode=mode, bucket_tokens=bucket_tokens, copies=copies
                )  # type: ignore[arg-type]
                chunk.run()
                error = chunk.verify()
                if not error < allowed or not chunk.verify_selection():
                    wrong.append(f"prefill at {past}, {mode} {bucket_tokens} {copies}: error {error:.1e}")
        kept = [plane.clone() for plane in (*cache.keys, *cache.pooled_keys)]
        images = page_images.evict(cache, tokens)
        cache.fill_random(2)
        page_images.restore(cache, images)
        torch.cuda.synchronize()
        same = zip(kept, (*cache.keys, *cache.pooled_keys), strict=True)
        if not all(torch.equal(before, after) for before, after in same):
            wrong.append("page images did not come back")
    return wrong


def main() -> int:
    """0 if every result was right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiers", default="vram,host", help="host needs memory that can be locked")
    asked = parser.parse_args()
    failures = 0
    for dtype in (torch.float16, torch.bfloat16):
        made = TritonBackend(torch.device("cuda"), dtype=dtype)
        for tier in asked.tiers.split(","):
            for shape, tokens in ((SMALL, 203), (SMALL, 67), (FULL, 2051), (FULL, 5003)):
                wrong = one_cache(made, shape, tokens=tokens, tier=tier)
                failures += len(wrong)
                print(dtype, tier, "small" if shape is SMALL else "full", tokens, *(wrong or ["right"]), sep="  ")
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
