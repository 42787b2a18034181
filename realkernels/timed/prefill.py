"""Prefill of a chunk over a paged cache of any codec, and dequantising such a cache, as they are timed and checked."""

from collections.abc import Callable

import torch

from realkernels.caches.paged import NoKernel, PagedCache
from realkernels.codecs import Arrangement, Codec, Planes
from realkernels.kernels.dequantise import dequantiser, missing
from realkernels.kernels.prefill import (
    KV_CHUNK_TOKENS,
    ChunkScratch,
    attend_chunk,
    check_chunk,
    kv_chunks,
    reference_dequantiser,
)  # fmt: skip
from realkernels.shape import AttentionShape
from realkernels.timed.attend_decode import CacheAttention, own_codec, query_dtype
from realkernels.timed.call import TimedCall


class Dequantise(TimedCall):
    """The first `tokens` of one cache dequantised, kv chunk by kv chunk, in the stored basis.

    NoKernel where this device has none for the codec; ValueError for sizes that do not fit.
    """

    def __init__(
        self, codec_name: str, *, arrangement: Arrangement | None = None, shape: AttentionShape | None = None,
        tokens: int, kv_chunk_tokens: int = KV_CHUNK_TOKENS, device: torch.device,
    ) -> None:  # fmt: skip
        self.shape, self.tokens, self.kv_chunk_tokens = shape or AttentionShape(), tokens, kv_chunk_tokens
        self.codec = _codec(codec_name, arrangement, device)
        self.cache = PagedCache.fill(self.codec, self.shape, sequences=1, tokens=tokens, device=device)
        check_chunk(
            self.codec, self.cache.planes, self.cache.table[0], q_tokens=1, ctx_tokens=tokens,
            kv_chunk_tokens=kv_chunk_tokens,
        )  # fmt: skip
        size = (kv_chunk_tokens, self.shape.kv_heads, self.shape.head_dim)
        self.keys, self.values = torch.empty(2, *size, dtype=query_dtype(codec_name, device), device=device)
        self._dequantise = _dequantiser(self.codec, self.cache.planes, device)
        self.moved_bytes = dequantised_bytes(self.codec, self.shape, tokens=tokens, dtype=self.keys.dtype)

    def run(self) -> None:
        """All kv chunks, each over the one before."""
        for first, last in kv_chunks(self.tokens, self.kv_chunk_tokens):
            self._dequantise(self.cache.table[0], self.keys, self.values, first=first, last=last)

    def poison(self) -> None:
        """NaN in the numbers of K and V."""
        for part in (self.keys, self.values):
            part.fill_(float("nan"))

    def finite(self) -> bool:
        """Whether the last kv chunk has been written."""
        first = (self.tokens - 1) // self.kv_chunk_tokens * self.kv_chunk_tokens
        return all(bool(part[: self.tokens - first].isfinite().all()) for part in (self.keys, self.values))

    def error(self) -> float:
        """Share of the last kv chunk's numbers that are not those of the reference, rounded."""
        first = (self.tokens - 1) // self.kv_chunk_tokens * self.kv_chunk_tokens
        return self._wrong(first, self.tokens)

    def verify(self) -> float:
        """The largest share of any kv chunk."""
        worst = 0.0
        for first, last in kv_chunks(self.tokens, self.kv_chunk_tokens):
            self.poison()
            self._dequantise(self.cache.table[0], self.keys, self.values, first=first, last=last)
            worst = max(worst, self._wrong(first, last))
        return worst

    def _wrong(self, first: int, last: int) -> float:
        truth = self.codec.dequantise(self.cache.planes, self.cache.slots(0, first, last), checked=False)
        pairs = zip((self.keys, self.values), truth, strict=True)
        wrong = sum(int((part[: last - first] != made.to(part.dtype)).sum()) for part, made in pairs)
        return wrong / (2 * truth[0].numel())


class AttendChunk(CacheAttention):
    """Attention of a sequence's newest tokens kv chunk by kv chunk (`kernels/prefill.py`), their K and V being there.

    NoKernel where this device dequantises no such codec.
    """

    def __init__(
        self, codec_name: str, *, arrangement: Arrangement | None = None, shape: AttentionShape | None = None,
        q_tokens: int, ctx_tokens: int, kv_chunk_tokens: int = KV_CHUNK_TOKENS, caches: int | None = None,
        device: torch.device,
    ) -> None:  # fmt: skip
        codec, shape = _codec(codec_name, arrangement, device), shape or AttentionShape()
        super().__init__(codec, shape, batch=1, ctx_tokens=ctx_tokens, q_tokens=q_tokens, caches=caches, device=device)
        for table in self.cache.table:
            check_chunk(
                codec, self.cache.planes, table, q_tokens=q_tokens, ctx_tokens=ctx_tokens,
                kv_chunk_tokens=kv_chunk_tokens,
            )  # fmt: skip
        self.scratch = ChunkScratch.allocate(
            kv_chunk_tokens=kv_chunk_tokens, q_tokens=q_tokens, **vars(shape), dtype=self.query.dtype, device=device
        )
        self._dequantise = _dequantiser(codec, self.cache.planes, device)
        self.moved_bytes = dequantised_bytes(codec, shape, tokens=ctx_tokens, dtype=self.query.dtype)

    def attend(self, number: int, query: torch.Tensor, output: torch.Tensor) -> None:
        """By `attend_chunk`."""
        past = self.ctx_tokens - self.q_tokens
        attend_chunk(query[0], self._dequantise, self.cache.table[number], output[0], self.scratch, past_tokens=past)

    def poison(self) -> None:
        """NaN in outputs and scratch, fresh queries."""
        super().poison()
        for part in vars(self.scratch).values():
            part.fill_(float("nan"))


def dequantised_bytes(codec: Codec, shape: AttentionShape, *, tokens: int, dtype: torch.dtype) -> float:
    """Of dequantising so many tokens: codes and scales read, numbers of K and V written."""
    written = 2 * shape.kv_heads * shape.head_dim * dtype.itemsize
    return float(tokens * (codec.token_bytes(shape.kv_heads, shape.head_dim) + written))


def _codec(name: str, arrangement: Arrangement | None, device: torch.device) -> Codec:
    """NoKernel, before anything is allocated, where this device dequantises no such codec."""
    codec = own_codec(name, arrangement)
    reason = "" if device.type == "cpu" else missing(codec)
    if reason:
        raise NoKernel(reason)
    return codec


def _dequantiser(codec: Codec, planes: Planes, device: torch.device) -> Callable[..., None]:
    return (reference_dequantiser if device.type == "cpu" else dequantiser)(codec, planes)
