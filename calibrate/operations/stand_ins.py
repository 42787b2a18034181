"""The classes of `realkernels/timed/`, made of what stands for them until they are there; this file goes then."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from realkernels import format_warm
from realkernels.chunk import pieces
from realkernels.format_append import FormatAppend
from realkernels.format_decode import FormatDecode
from realkernels.format_gather import HostGather, record_cache
from realkernels.format_pool import default_arrangement
from realkernels.format_prefill import FormatPrefill
from realkernels.format_warm import compile_ahead
from realkernels.library import LibraryAttention, LibraryProducts, flash_missing, random_weights
from realkernels.library_elementwise import LibraryAppend, LibraryElementwise
from realkernels.library_layer import LibraryLayers
from realkernels.library_sampling import LibrarySampling
from realkernels.ngram import NgramFile as RowFile
from realkernels.ngram import open_table, reference_rows
from realkernels.page_images import evict_page, restore_page
from realkernels.timing import clock_seconds

__all__ = ["RowFile", "Wanted", "compile_ahead", "default_arrangement", "flash_missing", "open_table", "random_weights"]
INFINITE = float("inf")


def Wanted(name: str, arrangement: Any, number: int, kind: Any) -> format_warm.Wanted:  # noqa: N802
    """One kernel, by the word that these files have for its kind."""
    return format_warm.Wanted(name, arrangement, number, "expand" if kind == "dequantise" else kind)


class _Of:
    """A timed call around another object."""

    calls, moved_bytes, flops, link_bytes, capturable = 1, 0.0, 0.0, 0.0, True

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def run(self) -> None:
        self.inner.run()

    def poison(self) -> None:
        self.inner.poison()

    def finite(self) -> bool:
        return bool(self.inner.finite())

    def verify(self) -> float:
        return float(self.inner.verify())

    def error(self) -> float:
        return float(self.inner.error()) if hasattr(self.inner, "error") else 0.0 if self.finite() else INFINITE


class AttendDecode(_Of):
    def __init__(self, name: str, *, q_tokens: int, **given: Any) -> None:
        super().__init__(FormatDecode(name, query_tokens=q_tokens, **given))
        self.calls, self.moved_bytes = self.inner.caches, self.inner.cache_bytes


class Append(_Of):
    def __init__(self, name: str, *, layers: int, **given: Any) -> None:
        super().__init__(FormatAppend(name, layers=layers, **given))
        self.calls, self.moved_bytes = layers, self.inner.moved_bytes

    def verify(self) -> float:
        return INFINITE if self.inner.verify() else 0.0


class AttendChunk(_Of):
    def __init__(self, name: str, *, q_tokens: int, **given: Any) -> None:
        super().__init__(FormatPrefill(name, rows=q_tokens, **given))
        self.calls, self.moved_bytes, self.flops = self.inner.caches, self.inner.expanded_bytes, self.inner.flops


class Dequantise(_Of):
    def __init__(self, name: str, *, tokens: int, **given: Any) -> None:
        super().__init__(FormatPrefill(name, rows=1, ctx_tokens=tokens, caches=1, **given))
        self.calls, self.moved_bytes = self.inner.caches, self.inner.expanded_bytes

    def run(self) -> None:
        self.inner.run_expand()

    def verify(self) -> float:
        self.poison()
        self.run()
        return self.error()

    def error(self) -> float:
        inner, (first, last) = self.inner, list(pieces(self.inner.ctx_tokens, self.inner.scratch.piece_tokens))[-1]
        truth = inner.format.read(inner.pool.planes, inner.pool.slots(inner.caches - 1, first, last), checked=False)
        made = (inner.scratch.keys, inner.scratch.values)
        right = all(
            torch.equal(part[: last - first], read.to(inner.dtype)) for part, read in zip(made, truth, strict=True)
        )
        return 0.0 if right else INFINITE


def backend_of(device: torch.device, folder: str | None = None) -> Any:
    if device.type == "cpu":
        from realkernels.cpu_backend import CpuBackend  # noqa: PLC0415

        return CpuBackend(folder=folder, threads=torch.get_num_threads())
    from realkernels.triton_backend import TritonBackend  # noqa: PLC0415

    return TritonBackend(device)


@contextmanager
def qsa_cache(
    shape: Any, *, layers: int, tokens: int, tier: Any, device: torch.device, huge_pages: bool, folder: str | None
) -> Iterator[Any]:
    with backend_of(device, folder).cache(
        shape, layers=layers, tokens=tokens, tier=tier, huge_pages=huge_pages
    ) as cache:  # fmt: skip
        yield cache


@contextmanager
def interleaved_cache(name: str, **given: Any) -> Iterator[Any]:
    with record_cache(name, **given) as cache:
        yield cache


class _Step(_Of):
    def __init__(self, cache: Any, *, ctx_tokens: int) -> None:
        super().__init__(backend_of(cache.device).decode_step(cache, end=ctx_tokens))
        self.calls = cache.layers
        self.poison()

    def poison(self) -> None:
        self.inner.query.normal_()
        self.inner.index_query.normal_()
        self.inner.selected.fill_(-1)
        self.inner.output.fill_(float("nan"))

    def finite(self) -> bool:
        return bool(self.inner.output.isfinite().all())

    def verify(self) -> float:
        self.poison()
        self.run()
        return self.error()

    def error(self) -> float:
        try:
            exact, error = self.inner.verify()
        except IndexError:
            return INFINITE
        return float(error) if exact else INFINITE


class DecodeSelect(_Step):
    def run(self) -> None:
        self.inner.select()

    def error(self) -> float:
        try:
            self.inner.gather()
        except IndexError:
            return INFINITE
        return super().error()


class DecodeGather(_Step):
    def poison(self) -> None:
        super().poison()
        self.inner.select()

    def run(self) -> None:
        self.inner.gather()


class DecodeStep(_Step):
    def __init__(self, cache: Any, *, ctx_tokens: int, backbone_bytes: int = 0) -> None:
        super().__init__(cache, ctx_tokens=ctx_tokens)
        self.calls, made = 1, {"dtype": torch.bfloat16, "device": cache.device}
        size = (backbone_bytes // 2 // 4096, 4096)
        matrices = [torch.randn(size, **made) for _ in range(cache.layers if backbone_bytes else 0)]
        vector, out = torch.randn(4096, **made), torch.empty(size[0], **made)
        self.backbone: Callable[[int], object] | None = None
        if matrices:
            self.backbone = lambda layer: torch.mv(matrices[layer], vector, out=out)

    def run(self) -> None:
        self.inner.run(before_layer=self.backbone)


class GatherBlocks(_Of):
    def __init__(self, cache: Any, *, ctx_tokens: int) -> None:
        super().__init__(HostGather(cache, end=ctx_tokens))
        self.calls, self.link_bytes = len(cache.layers), self.inner.link_bytes
        self.moved_bytes = self.link_bytes


class _Chunk(_Of):
    def __init__(
        self, cache: Any, *, ctx_tokens: int, q_tokens: int, bucket_tokens: int = 0, copies: Any = "overlapped"
    ) -> None:
        mode = "staged" if bucket_tokens else "in_place"
        given = {"past": ctx_tokens - q_tokens, "rows": q_tokens, "mode": mode, "bucket_tokens": bucket_tokens}
        super().__init__(backend_of(cache.device).prefill_chunk(cache, layer=0, copies=copies, **given))
        self.link_bytes, self.seed = self.inner.link_bytes, 0

    def poison(self) -> None:
        self.seed += 1
        self.inner.refresh(seed=self.seed)

    def finite(self) -> bool:
        return True

    def verify(self) -> float:
        self.poison()
        self.run()
        return self.error()


class PrefillAttend(_Chunk):
    def error(self) -> float:
        return float(self.inner.verify())


class PrefillSelect(_Chunk):
    def poison(self) -> None:
        super().poison()
        self.inner.selection.fill_(0)

    def run(self) -> None:
        self.inner.select()

    def error(self) -> float:
        try:
            return 0.0 if self.inner.verify_selection() else INFINITE
        except IndexError:
            return INFINITE


class Linear(_Of):
    def __init__(self, shape: Any, *, weights: Any, **given: Any) -> None:
        super().__init__(LibraryProducts(shape, weights=weights, **given))
        self.calls = len(weights)


class Elementwise(_Of):
    def __init__(self, shape: Any, *, layers: int, **given: Any) -> None:
        super().__init__(LibraryElementwise(shape, layers=layers, **given))
        self.calls = layers


class PlainAppend(_Of):
    def __init__(self, shape: Any, *, layers: int, **given: Any) -> None:
        super().__init__(LibraryAppend(shape, layers=layers, **given))
        self.calls = layers


class FlashAttention(_Of):
    def __init__(self, shape: Any, *, q_tokens: int, past_tokens: int, caches: int, **given: Any) -> None:
        super().__init__(LibraryAttention(shape, rows=q_tokens, past=past_tokens, caches=caches, **given))
        self.calls, self.moved_bytes, self.flops = caches, self.inner.cache_bytes, self.inner.flops


class DenseLayers(_Of):
    def __init__(self, shape: Any, *, q_tokens: int, past_tokens: int, layers: int, **given: Any) -> None:
        super().__init__(LibraryLayers(shape, rows=q_tokens, past=past_tokens, layers=layers, **given))
        self.calls = layers


class Sampling(_Of):
    def __init__(self, *, tokens: int, **given: Any) -> None:
        super().__init__(LibrarySampling(rows=tokens, **given))


class ReadRows(_Of):
    capturable = False

    def __init__(self, table: Any, *, reads: int) -> None:
        super().__init__(table)
        self.file: RowFile = table._file
        self.reads = reads
        self.moved_bytes = float(reads * self.file.row_bytes)
        self.poison()

    def poison(self) -> None:
        self.wanted = torch.randint(self.file.rows, (self.reads,))
        self.found: Any = None
        self.file.forget()

    def run(self) -> None:
        self.found = self.inner.read(self.wanted)

    def finite(self) -> bool:
        return self.found is not None

    def verify(self) -> float:
        self.poison()
        self.run()
        return self.error()

    def error(self) -> float:
        truth = reference_rows(self.file, self.wanted)
        right = self.found is not None and [bytes(row.tolist()) for row in self.found] == truth
        return 0.0 if right else INFINITE


class EvictPages(_Of):
    capturable = False

    def __init__(self, cache: Any, *, pages: int) -> None:
        super().__init__(cache)
        self.calls, self.images = pages, [evict_page(cache, page) for page in range(pages)]
        self.moved_bytes = self.link_bytes = float(self.images[0].nbytes)

    def poison(self) -> None:
        for image in self.images:
            image.fill_(255)

    def run(self) -> None:
        for page, image in enumerate(self.images):
            evict_page(self.inner, page, image)

    def finite(self) -> bool:
        return True

    def verify(self) -> float:
        self.poison()
        self.run()
        return self.error()

    def error(self) -> float:
        right = all(
            torch.equal(evict_page(self.inner, page).view(torch.uint8), image)
            for page, image in enumerate(self.images)
        )  # fmt: skip
        return 0.0 if right else INFINITE


class RestorePages(EvictPages):
    def poison(self) -> None:
        for plane in (self.inner.keys[0], self.inner.values[-1]):
            plane.zero_()

    def run(self) -> None:
        for page, image in enumerate(self.images):
            restore_page(self.inner, page, image)


def host_seconds(work: Callable[[], object]) -> float:
    return clock_seconds(work, repeats=1, warm_up=0)[0]
