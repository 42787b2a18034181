"""Prefill of a chunk over a paged cache of any format, as it is timed and checked.

One call is what a layer of a model does with a chunk's queries, its K and V being in the cache already: rotate the
queries where the format is rotated, attend piece by piece (`realkernels/chunk.py`), rotate the outputs back.
"""

from collections.abc import Callable

import torch

from realkernels.chunk import PIECE_TOKENS, ChunkScratch, attend_chunk, check_chunk, pieces
from realkernels.chunk_cpu import reader
from realkernels.format_pool import NoKernel, Pool, default_arrangement
from realkernels.formats import Arrangement, format_named
from realkernels.library import check_rows_of, relative_error
from realkernels.shape import AttentionShape
from realkernels.timed.attend_decode import Rotation, caches_beyond, query_dtype, rotate
from realkernels.timed.call import TimedCall

__all__ = ["PIECE_TOKENS", "FormatPrefill", "attend_chunk"]


class FormatPrefill(TimedCall):
    """Attention of a sequence's newest `rows` tokens over all of its `ctx_tokens`, over several caches in turn.

    NoKernel where this device has none for the format; ValueError, before anything is allocated, for sizes that do not
    fit.
    """

    def __init__(
        self, name: str, *, arrangement: Arrangement | None = None, shape: AttentionShape | None = None, rows: int,
        ctx_tokens: int, piece_tokens: int = PIECE_TOKENS, caches: int | None = None,
        dtype: torch.dtype | None = None, device: torch.device, seed: int = 0,
    ) -> None:  # fmt: skip
        self.shape = shape or AttentionShape()
        self.format = format_named(name, arrangement=arrangement or default_arrangement(name))
        self.rows, self.ctx_tokens, self.past = rows, ctx_tokens, ctx_tokens - rows
        if not 1 <= rows <= ctx_tokens:
            raise ValueError(f"{rows} rows do not end a context of {ctx_tokens} tokens")
        self.token_bytes = self.format.token_bytes(self.shape.kv_heads, self.shape.head_dim)
        self.caches = self.calls = caches or caches_beyond(self.cache_bytes, device)
        self.dtype = dtype or query_dtype(name, device)
        if device.type != "cpu":
            _refuse(name)
        self.pool = Pool.fill(
            self.format, self.shape, sequences=self.caches, tokens=ctx_tokens, device=device, seed=seed
        )  # fmt: skip
        for sequence in range(self.caches):
            check_chunk(
                self.format, self.pool.planes, self.pool.table[sequence], rows=rows, ctx_tokens=ctx_tokens,
                piece_tokens=piece_tokens,
            )  # fmt: skip
        heads, dim = self.shape.query_heads, self.shape.head_dim
        self.query = torch.randn(rows, heads, dim, dtype=self.dtype, device=device)
        self.output = torch.empty_like(self.query)
        self._rotation = Rotation(self.format, dim, self.dtype, device)
        self._rotated = self.query if self._rotation.query is None else torch.empty_like(self.query)
        self._stored = self.output if self._rotation.output is None else torch.empty_like(self.query)
        self.scratch = ChunkScratch.allocate(
            piece_tokens=piece_tokens, rows=rows, query_heads=heads, kv_heads=self.shape.kv_heads, head_dim=dim,
            dtype=self.dtype, device=device,
        )  # fmt: skip
        self._expand = self._expander(device)

    def _expander(self, device: torch.device) -> Callable[..., None]:
        if device.type == "cpu":
            return reader(self.format, self.pool.planes)
        from realkernels.expand.expander import expander  # noqa: PLC0415 - needs triton

        return expander(self.format, self.pool.planes)

    @property
    def cache_bytes(self) -> int:
        """K and V of one cache with their scales, what lies beside apart."""
        return self.ctx_tokens * self.token_bytes

    @property
    def expanded_bytes(self) -> int:
        """Of unpacking one cache: codes and scales read, numbers of K and V written."""
        element = self.scratch.keys.element_size()
        return self.cache_bytes + self.ctx_tokens * 2 * self.shape.kv_heads * self.shape.head_dim * element

    @property
    def flops(self) -> float:
        """Operations of one call, exactly: the masked ones are none."""
        pairs = self.rows * self.past + self.rows * (self.rows + 1) / 2
        return 4.0 * self.shape.query_heads * self.shape.head_dim * pairs

    def run(self) -> None:
        """One call a cache."""
        for sequence in range(self.caches):
            if self._rotation.query is not None:
                rotate(self.query, self._rotation.query, self._rotated)
            attend_chunk(
                self._rotated, self._expand, self.pool.table[sequence], self._stored, self.scratch, past=self.past
            )
            if self._rotation.output is not None:
                rotate(self._stored, self._rotation.output, self.output)

    def run_expand(self, *, tokens: int | None = None) -> None:
        """What a call unpacks, or the first `tokens` of it, and nothing else; one call a cache."""
        for sequence in range(self.caches):
            for first, last in pieces(tokens or self.ctx_tokens, self.scratch.piece_tokens):
                self._expand(
                    self.pool.table[sequence], self.scratch.keys, self.scratch.values, first=first, last=last
                )  # fmt: skip

    def expand_error(self) -> float:
        """Share of numbers of the last cache that `run_expand` makes otherwise than the format's `read`, rounded."""
        wrong, count = 0, 0
        for first, last in pieces(self.ctx_tokens, self.scratch.piece_tokens):
            for part in (self.scratch.keys, self.scratch.values):
                part.fill_(float("nan"))
            self._expand(
                self.pool.table[self.caches - 1], self.scratch.keys, self.scratch.values, first=first, last=last
            )
            slots = self.pool.slots(self.caches - 1, first, last)
            truth = self.format.read(self.pool.planes, slots, checked=False)
            for part, read in zip((self.scratch.keys, self.scratch.values), truth, strict=True):
                wrong += int((part[: last - first] != read.to(self.dtype)).sum())
                count += read.numel()
        return wrong / count

    def poison(self) -> None:
        """NaN in outputs and scratch, fresh queries."""
        self.query.normal_()
        scratch = (self.scratch.keys, self.scratch.values, self.scratch.total, self.scratch.weight)
        for part in (self.output, self._stored, *scratch):
            part.fill_(float("nan"))

    def error(self) -> float:
        """Of the output as it is, which belongs to the last cache; infinite where something is not finite."""
        if not self.finite():
            return float("inf")
        group, worst = self.shape.group, 0.0
        for kv_head in {0, self.shape.kv_heads - 1}:
            heads = slice(kv_head * group, (kv_head + 1) * group)
            for row in check_rows_of(self.rows, torch.device("cpu")).tolist():
                seen = self.past + row + 1
                truth = self.pool.attend(self.query[row, heads], self.caches - 1, kv_head, seen=seen)
                worst = max(worst, relative_error(self.output[row, heads], truth))
        return worst


def _refuse(name: str) -> None:
    """NoKernel, before anything is allocated, where none unpacks the format."""
    from realkernels.expand.expander import missing  # noqa: PLC0415 - needs triton

    reason = missing(format_named(name))
    if reason:
        raise NoKernel(reason)
