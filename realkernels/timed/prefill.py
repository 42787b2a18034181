"""Prefill of a chunk over a paged cache of any codec, and dequantising such a cache, as they are timed and checked."""

from collections.abc import Callable

import torch

from realkernels.caches.paged import NoKernel, PagedCache
from realkernels.codecs import Arrangement, Codec, Planes, codec_named, default_arrangement
from realkernels.kernels.prefill import (
    KV_CHUNK_TOKENS,
    ChunkScratch,
    attend_chunk,
    check_chunk,
    kv_chunks,
    reference_dequantiser,
)  # fmt: skip
from realkernels.shape import AttentionShape
from realkernels.timed.attend_decode import Rotation, caches_beyond, query_dtype, rotate
from realkernels.timed.call import TimedCall, relative_error, some_rows


class Dequantise(TimedCall):
    """The first `tokens` of one cache dequantised, kv chunk by kv chunk, in the stored basis.

    `cache` is taken where it is given, and must hold so many tokens of the codec; made otherwise. NoKernel where this
    device has none for the codec; ValueError, before anything is allocated, for sizes that do not fit.
    """

    def __init__(
        self, codec_name: str, *, arrangement: Arrangement | None = None, shape: AttentionShape | None = None,
        tokens: int, kv_chunk_tokens: int = KV_CHUNK_TOKENS, cache: PagedCache | None = None,
        dtype: torch.dtype | None = None, device: torch.device, seed: int = 0,
    ) -> None:  # fmt: skip
        self.shape, self.tokens, self.kv_chunk_tokens = shape or AttentionShape(), tokens, kv_chunk_tokens
        self.codec = _codec(codec_name, arrangement, device)
        self.cache = cache or PagedCache.fill(
            self.codec, self.shape, sequences=1, tokens=tokens, device=device, seed=seed
        )
        check_chunk(
            self.codec, self.cache.planes, self.cache.table[0], q_tokens=1, ctx_tokens=tokens,
            kv_chunk_tokens=kv_chunk_tokens,
        )  # fmt: skip
        size = (kv_chunk_tokens, self.shape.kv_heads, self.shape.head_dim)
        self.keys, self.values = torch.empty(2, *size, dtype=dtype or query_dtype(codec_name, device), device=device)
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


class AttendChunk(TimedCall):
    """Attention of a sequence's newest `q_tokens` tokens over all of its `ctx_tokens`, over several caches in turn.

    One call is what a layer of a model does with a chunk's queries, its K and V being in the cache already: rotate the
    queries where the codec rotates, attend kv chunk by kv chunk (`kernels/prefill.py`), rotate the outputs back.
    NoKernel and ValueError as above.
    """

    def __init__(
        self, codec_name: str, *, arrangement: Arrangement | None = None, shape: AttentionShape | None = None,
        q_tokens: int, ctx_tokens: int, kv_chunk_tokens: int = KV_CHUNK_TOKENS, caches: int | None = None,
        dtype: torch.dtype | None = None, device: torch.device, seed: int = 0,
    ) -> None:  # fmt: skip
        self.shape = shape or AttentionShape()
        self.q_tokens, self.ctx_tokens, self.past_tokens = q_tokens, ctx_tokens, ctx_tokens - q_tokens
        if not 1 <= q_tokens <= ctx_tokens:
            raise ValueError(f"{q_tokens} new tokens do not end a context of {ctx_tokens} tokens")
        self.codec = _codec(codec_name, arrangement, device)
        heads, kv_heads, dim = self.shape.query_heads, self.shape.kv_heads, self.shape.head_dim
        self.cache_bytes = ctx_tokens * self.codec.token_bytes(kv_heads, dim)
        self.calls = caches or caches_beyond(self.cache_bytes, device)
        dtype = dtype or query_dtype(codec_name, device)
        self.cache = PagedCache.fill(
            self.codec, self.shape, sequences=self.calls, tokens=ctx_tokens, device=device, seed=seed
        )
        for table in self.cache.table:
            check_chunk(
                self.codec, self.cache.planes, table, q_tokens=q_tokens, ctx_tokens=ctx_tokens,
                kv_chunk_tokens=kv_chunk_tokens,
            )  # fmt: skip
        self.query = torch.randn(q_tokens, heads, dim, dtype=dtype, device=device)
        self.output = torch.empty_like(self.query)
        self._rotation = Rotation(self.codec, dim, dtype, device)
        self._rotated = self.query if self._rotation.query is None else torch.empty_like(self.query)
        self._stored = self.output if self._rotation.output is None else torch.empty_like(self.query)
        self.scratch = ChunkScratch.allocate(
            kv_chunk_tokens=kv_chunk_tokens, q_tokens=q_tokens, query_heads=heads, kv_heads=kv_heads, head_dim=dim,
            dtype=dtype, device=device,
        )  # fmt: skip
        self._dequantise = _dequantiser(self.codec, self.cache.planes, device)
        self.moved_bytes = dequantised_bytes(self.codec, self.shape, tokens=ctx_tokens, dtype=dtype)
        self.flops = 4.0 * heads * dim * (q_tokens * self.past_tokens + q_tokens * (q_tokens + 1) / 2)

    def run(self) -> None:
        """One call a cache."""
        for table in self.cache.table:
            if self._rotation.query is not None:
                rotate(self.query, self._rotation.query, self._rotated)
            attend_chunk(
                self._rotated, self._dequantise, table, self._stored, self.scratch, past_tokens=self.past_tokens
            )
            if self._rotation.output is not None:
                rotate(self._stored, self._rotation.output, self.output)

    def poison(self) -> None:
        """NaN in outputs and scratch, fresh queries."""
        self.query.normal_()
        for part in (self.output, self._stored, *vars(self.scratch).values()):
            part.fill_(float("nan"))

    def error(self) -> float:
        """Of the output as it is, which belongs to the last cache; infinite where something is not finite."""
        if not self.finite():
            return float("inf")
        group, worst = self.shape.group, 0.0
        for kv_head in {0, self.shape.kv_heads - 1}:
            heads = slice(kv_head * group, (kv_head + 1) * group)
            for token in some_rows(self.q_tokens):
                seen = self.past_tokens + token + 1
                truth = self.cache.attend(self.query[token, heads], self.calls - 1, kv_head, seen=seen)
                worst = max(worst, relative_error(self.output[token, heads], truth))
        return worst


def dequantised_bytes(codec: Codec, shape: AttentionShape, *, tokens: int, dtype: torch.dtype) -> float:
    """Of dequantising so many tokens: codes and scales read, numbers of K and V written."""
    written = 2 * shape.kv_heads * shape.head_dim * dtype.itemsize
    return float(tokens * (codec.token_bytes(shape.kv_heads, shape.head_dim) + written))


def _codec(name: str, arrangement: Arrangement | None, device: torch.device) -> Codec:
    """NoKernel, before anything is allocated, where this device dequantises no such codec."""
    codec = codec_named(name, arrangement=arrangement or default_arrangement(name))
    if device.type != "cpu":
        from realkernels.kernels.dequantise import missing  # noqa: PLC0415 - needs triton

        reason = missing(codec)
        if reason:
            raise NoKernel(reason)
    return codec


def _dequantiser(codec: Codec, planes: Planes, device: torch.device) -> Callable[..., None]:
    if device.type == "cpu":
        return reference_dequantiser(codec, planes)
    from realkernels.kernels.dequantise import dequantiser  # noqa: PLC0415 - needs triton

    return dequantiser(codec, planes)
