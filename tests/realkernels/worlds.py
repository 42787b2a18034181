"""Small shapes, caches of both backends, and data that gives reads of the wrong place away."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from realkernels.backend import Backend, QsaCache, Tier
from realkernels.cpu_backend import CpuBackend
from realkernels.triton_backend import TritonBackend

from realkernels.shape import QsaShape

SMALL = QsaShape(layers=2, query_heads=6, kv_heads=2, head_dim=32, index_heads=4, index_dim=16, budget=64)
"""16 blocks of 4 tokens, 3 query heads to a KV head."""

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Relative error of an output rounded to these, p rounded before its product included."""

BACKENDS = ["triton", "cpu"]


def backend(name: str, dtype: torch.dtype = torch.float16) -> Backend:
    """The Triton kernels through the interpreter, or plain torch."""
    if name == "triton":
        return TritonBackend(torch.device("cpu"), dtype=dtype)
    return CpuBackend(dtype=dtype, threads=1)


@contextmanager
def filled(
    name: str, *, tokens: int, tier: Tier = "vram", dtype: torch.dtype = torch.float16, shape: QsaShape = SMALL,
    layers: int = 1,
) -> Iterator[tuple[Backend, QsaCache]]:  # fmt: skip
    """A backend and a cache with random values."""
    made = backend(name, dtype)
    with made.cache(shape, layers=layers, tokens=tokens, tier=tier) as cache:
        cache.fill_random(1)
        yield made, cache


def poison(planes: list[torch.Tensor], keep: torch.Tensor) -> None:
    """NaN in every token that is not in `keep`."""
    for plane in planes:
        kept = plane[keep].clone()
        plane.fill_(float("nan"))
        plane[keep] = kept
