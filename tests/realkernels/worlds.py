"""Small shapes, caches whose kernels are Triton's or plain torch, and data that gives reads of the wrong place away."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from realkernels.caches.qsa import QsaCache, Tier, qsa_cache
from realkernels.shape import QsaShape

CPU = torch.device("cpu")
SMALL = QsaShape(layers=2, query_heads=6, kv_heads=2, head_dim=32, index_heads=4, index_dim=16, budget=64)
"""16 blocks of 4 tokens, 3 query heads to a KV head."""

HALVES = [torch.float16, torch.bfloat16]
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Relative error of an output rounded to these, p rounded before its product included."""

FORMS = ["triton", "torch"]
"""Triton's through the interpreter, or plain torch."""

TIERS: list[Tier] = ["vram", "host"]


@contextmanager
def filled(
    kernels: str, *, tokens: int, tier: Tier = "vram", dtype: torch.dtype = torch.float16, shape: QsaShape = SMALL,
    layers: int = 1,
) -> Iterator[QsaCache]:  # fmt: skip
    """A cache with random values."""
    with qsa_cache(
        shape, layers=layers, tokens=tokens, tier=tier, device=CPU, dtype=dtype, triton=kernels == "triton"
    ) as cache:
        cache.fill_random(1)
        yield cache


def poison(planes: list[torch.Tensor], keep: torch.Tensor) -> None:
    """NaN in every token that is not in `keep`."""
    for plane in planes:
        kept = plane[keep].clone()
        plane.fill_(float("nan"))
        plane[keep] = kept
