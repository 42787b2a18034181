"""The kernels' protocol on any computer: plain torch on the CPU, the offload tier a file-backed memory map.

Planes are fp16 by default, as on a GPU, so that bytes, runs and layouts are the same; products are float32. The device
tier is ordinary memory, so that what differs between the tiers is the file behind the map, not a link.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch

from realkernels.backend import Copies, Mode, QsaCache, Tier
from realkernels.cache import PlaneCache, plane_cache
from realkernels.cpu_kernels import RunningSoftmax, attend_bucket, best_blocks, gather_attend, score_blocks
from realkernels.heap import keep_freed_memory
from realkernels.layouts import Place, PlaneSpec, layout_of_tier
from realkernels.pooling import pool_blocks
from realkernels.rows import bucket_bounds, select_rows, whole_bounds
from realkernels.shape import QsaShape
from realkernels.steps import DecodeBase, PrefillBase
from realkernels.timing import clock_seconds

CPU = torch.device("cpu")
ROUNDS = 2
"""A processor is shared with whatever else runs: one moment is not like the next."""


class CpuDecodeStep(DecodeBase):
    """One token, layer by layer."""

    def __init__(self, cache: QsaCache, *, end: int, dtype: torch.dtype) -> None:
        super().__init__(cache, end=end, device=CPU, dtype=dtype)
        self._scores = torch.empty(cache.shape.blocks(end))

    def select_layer(self, layer: int) -> None:
        """Score all pooled keys, keep the best."""
        best_blocks(self.scores(layer), self.selected[layer])

    def gather_layer(self, layer: int) -> None:
        """Gather by block, then dense attention."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        gather_attend(
            self.query[layer], keys, values, self.selected[layer], self.end, self.output[layer], self.cache.shape
        )

    def scores(self, layer: int) -> torch.Tensor:
        """Overwritten by the next layer's."""
        score_blocks(self.index_query[layer], self.pooled(layer), self._scores)
        return self._scores


class CpuPrefillChunk(PrefillBase):
    """One chunk of one layer. A thread makes overlapped copies: torch lets go of the interpreter while copying."""

    def __init__(
        self, cache: QsaCache, *, layer: int, past: int, rows: int, mode: Mode, bucket_tokens: int, copies: Copies,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        super().__init__(
            cache, layer=layer, past=past, rows=rows, mode=mode, bucket_tokens=bucket_tokens, copies=copies,
            device=CPU, dtype=dtype,
        )  # fmt: skip
        self._carried = RunningSoftmax.allocate(rows, cache.shape)
        buffers = 0 if mode == "in_place" else 2 if copies == "overlapped" else 1
        size = (bucket_tokens, cache.shape.kv_heads, cache.shape.head_dim)
        self._buffers = [(torch.empty(size, dtype=dtype), torch.empty(size, dtype=dtype)) for _ in range(buffers)]

    def select(self) -> None:
        """Selection of every row."""
        self.selection.copy_(
            select_rows(self.index_query, self.cache.pooled_keys[self.layer], self.past, self.cache.shape)
        )

    def run(self) -> None:
        """Attention of every row."""
        self._carried.reset()
        if self.mode == "in_place":
            keys, values = self.cache.keys[self.layer], self.cache.values[self.layer]
            self._attend(keys, values, whole_bounds(self.selection), bucket=0)
        else:
            self._run_staged()
        self._carried.write(self.output)

    def _run_staged(self) -> None:
        buckets = -(-self.read_tokens // self.bucket_tokens)
        bounds = bucket_bounds(self.selection, self.bucket_tokens // self.cache.shape.ratio, buckets)
        if self.copies == "serial":
            for bucket in range(buckets):
                self._attend(*self._copy(bucket), bounds, bucket=bucket)
            return
        with ThreadPoolExecutor(max_workers=1) as copier:
            coming: Future[tuple[torch.Tensor, torch.Tensor]] = copier.submit(self._copy, 0)
            for bucket in range(buckets):
                keys, values = coming.result()
                if bucket + 1 < buckets:  # into the other buffer, whose bucket has been attended to
                    coming = copier.submit(self._copy, bucket + 1)
                self._attend(keys, values, bounds, bucket=bucket)

    def _copy(self, bucket: int) -> tuple[torch.Tensor, torch.Tensor]:
        first = bucket * self.bucket_tokens
        part = slice(first, min(first + self.bucket_tokens, self.read_tokens))
        keys, values = self._buffers[bucket % len(self._buffers)]
        keys[: part.stop - first].copy_(self.cache.keys[self.layer][part])
        values[: part.stop - first].copy_(self.cache.values[self.layer][part])
        return keys, values

    def _attend(self, keys: torch.Tensor, values: torch.Tensor, bounds: torch.Tensor, *, bucket: int) -> None:
        attend_bucket(
            self.query, keys, values, self.selection, bounds, self._carried, bucket=bucket,
            bucket_start=bucket * self.bucket_tokens if self.mode == "staged" else 0, past=self.past,
            shape=self.cache.shape,
        )  # fmt: skip


class CpuBackend:
    """`backend.Backend` on the CPU. `folder` is where the offload tier keeps its nameless files.

    torch is told, process-wide, to compute with `threads` threads; None leaves one core to the copying thread and to
    whatever else runs: a parallel loop waits for its slowest thread, which on a busy machine takes a time slice.
    """

    name = "cpu"
    device = CPU
    rounds = ROUNDS

    def __init__(
        self, *, folder: str | None = None, dtype: torch.dtype = torch.float16, threads: int | None = None
    ) -> None:
        self.folder, self.dtype = folder, dtype
        self.threads = max(1, (os.cpu_count() or 1) - 1) if threads is None else threads
        torch.set_num_threads(self.threads)
        keep_freed_memory()

    @contextmanager
    def cache(
        self, shape: QsaShape, *, layers: int, tokens: int, tier: Tier, huge_pages: bool = True
    ) -> Iterator[PlaneCache]:
        """Planes for `layers` layers; RuntimeError in one line where the folder has no room. Huge pages are ignored."""
        spec = PlaneSpec(shape=shape, layers=layers, tokens=tokens, dtype=self.dtype)
        place = Place(device=CPU, folder=self.folder, huge_pages=huge_pages)
        with plane_cache(layout_of_tier(tier), spec, place, pool_blocks) as cache:
            yield cache

    def decode_step(self, cache: QsaCache, *, end: int) -> CpuDecodeStep:
        """A step for the token at position `end` - 1."""
        return CpuDecodeStep(cache, end=end, dtype=self.dtype)

    def prefill_chunk(
        self, cache: QsaCache, *, layer: int, past: int, rows: int, mode: Mode, bucket_tokens: int = 0,
        copies: Copies = "overlapped",
    ) -> CpuPrefillChunk:  # fmt: skip
        """A chunk of one layer, with queries and selection of seed 0."""
        chunk = CpuPrefillChunk(
            cache, layer=layer, past=past, rows=rows, mode=mode, bucket_tokens=bucket_tokens, copies=copies,
            dtype=self.dtype,
        )  # fmt: skip
        chunk.refresh(0)
        return chunk

    def capture(self, work: Callable[[], object]) -> Callable[[], object]:
        """`work` itself: there is nothing to capture."""
        return work

    def seconds(
        self, work: Callable[[], object], *, repeats: int, warm_up: int = 3,
        before: Callable[[int], object] | None = None,
    ) -> list[float]:  # fmt: skip
        """Wall-clock seconds of each repeat."""
        return clock_seconds(work, repeats=repeats, warm_up=warm_up, before=before)
