"""Decode attention over a paged cache of any format, as it is timed and checked; appending to such a cache.

One call is what a layer of a model does with its new tokens' queries: rotate them where the format is rotated, attend
over every cached token, rotate the result back. The rotations are small matrix products and part of the time.
"""

from collections.abc import Callable
from functools import partial

import torch

from realkernels.format_cpu import attend_blocks
from realkernels.format_pool import NoKernel, Pool, default_arrangement, random_rows
from realkernels.formats import Arrangement, Format, KVarN, format_named
from realkernels.library import relative_error
from realkernels.shape import AttentionShape

BEYOND_CACHES = {"cuda": 512 * 2**20, "cpu": 16 * 2**20}
"""Bytes that the caches of a run have together: several times what a device keeps on its chip."""

MOST_CACHES = {"cuda": 64, "cpu": 2}
Attend = Callable[[torch.Tensor, torch.Tensor], object]
"""Reads rotated queries, writes outputs in the stored basis."""


def caches_beyond(cache_bytes: float, device: torch.device) -> int:
    """Caches that a run takes in turn, so that what the device keeps of one is gone before it is read again."""
    return max(1, min(MOST_CACHES[device.type], round(BEYOND_CACHES[device.type] / cache_bytes)))


def query_dtype(name: str, device: torch.device) -> torch.dtype:
    """Of queries and outputs: what the model computes in."""
    if device.type == "cpu":
        return torch.float32
    return torch.float16 if name == "fp16" else torch.bfloat16


class Rotation:
    """The format's rotations as matrices [head_dim, head_dim]; None where it leaves a side as it is."""

    def __init__(self, fmt: Format, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        unit = torch.eye(head_dim, device=device)
        queries, outputs = fmt.rotate_query(unit), fmt.rotate_output(unit)
        self.query = None if torch.equal(queries, unit) else queries.to(dtype)
        self.output = None if torch.equal(outputs, unit) else outputs.to(dtype)


def rotate(rows: torch.Tensor, matrix: torch.Tensor, out: torch.Tensor) -> None:
    """Rows [..., head_dim] times `matrix`, into `out`."""
    torch.mm(rows.flatten(0, -2), matrix, out=out.view(-1, out.shape[-1]))


class FormatDecode:
    """Attention of the newest `query_tokens` tokens of `batch` sequences over `ctx_tokens` each, those included.

    NoKernel where this device has none for the format; ValueError for sizes that the format does not take; RuntimeError
    of torch where the caches do not fit.
    """

    def __init__(
        self, name: str, *, arrangement: Arrangement | None = None, shape: AttentionShape | None = None, batch: int = 1,
        ctx_tokens: int, query_tokens: int = 1, caches: int | None = None, device: torch.device, seed: int = 0,
    ) -> None:  # fmt: skip
        self.shape = shape or AttentionShape()
        self.format = format_named(name, arrangement=arrangement or default_arrangement(name))
        self.batch, self.ctx_tokens, self.query_tokens = batch, ctx_tokens, query_tokens
        if not 1 <= query_tokens <= ctx_tokens:
            raise ValueError(f"{query_tokens} query tokens do not end a context of {ctx_tokens} tokens")
        self.token_bytes = self.format.token_bytes(self.shape.kv_heads, self.shape.head_dim)
        self.caches = caches or caches_beyond(self.cache_bytes, device)
        dtype = query_dtype(name, device)
        size = (batch, query_tokens, self.shape.query_heads, self.shape.head_dim)
        self.query = torch.randn(size, dtype=dtype, device=device)
        self.output = torch.empty_like(self.query)
        self._rotation = Rotation(self.format, self.shape.head_dim, dtype, device)
        self._rotated = self.query if self._rotation.query is None else torch.empty_like(self.query)
        self._stored = self.output if self._rotation.output is None else torch.empty_like(self.query)
        _refuse(self.format, device)
        self.pool = Pool.fill(
            self.format, self.shape, sequences=batch * self.caches, tokens=ctx_tokens, device=device, seed=seed
        )  # fmt: skip
        self._calls = self._attentions(device)

    @property
    def cache_bytes(self) -> int:
        """K and V of one cache with their scales, what lies beside apart."""
        return self.batch * self.ctx_tokens * self.token_bytes

    @property
    def rotates(self) -> str:
        """Which products are part of a call: of queries, of outputs, of both, or none."""
        sides = (("queries", self._rotation.query), ("outputs", self._rotation.output))
        return " and ".join(name for name, matrix in sides if matrix is not None) or "none"

    def _attentions(self, device: torch.device) -> list[Attend]:
        parts = [range(at * self.batch, (at + 1) * self.batch) for at in range(self.caches)]
        if device.type == "cpu":
            return [partial(attend_blocks, self.pool, part) for part in parts]
        from realkernels.format_kernels import attentions  # noqa: PLC0415 - needs triton

        return attentions(self.pool, parts, query_tokens=self.query_tokens)

    def run(self) -> None:
        """One call a cache."""
        for attend in self._calls:
            if self._rotation.query is not None:
                rotate(self.query, self._rotation.query, self._rotated)
            attend(self._rotated, self._stored)
            if self._rotation.output is not None:
                rotate(self._stored, self._rotation.output, self.output)

    def poison(self) -> None:
        """NaN in the output, fresh queries."""
        self.query.normal_()
        for part in (self.output, self._stored):
            part.fill_(float("nan"))

    def finite(self) -> bool:
        """Whether the output has been written."""
        return bool(self.output.isfinite().all())

    def verify(self) -> float:
        """Run on fresh queries; worst relative error of the outermost tokens and heads against float64."""
        self.poison()
        self.run()
        return self.error()

    def error(self) -> float:
        """Of the output as it is, which belongs to the last cache; infinite where something is not finite."""
        if not self.finite():
            return float("inf")
        group, last = self.shape.group, (self.caches - 1) * self.batch
        worst = 0.0
        for row, kv_head in {(0, 0), (self.batch - 1, self.shape.kv_heads - 1)}:
            heads = slice(kv_head * group, (kv_head + 1) * group)
            for token in {0, self.query_tokens - 1}:
                seen = self.ctx_tokens - self.query_tokens + token + 1
                truth = self.pool.attend(self.query[row, token, heads], last + row, kv_head, seen=seen)
                worst = max(worst, relative_error(self.output[row, token, heads], truth))
        return worst


def _refuse(fmt: Format, device: torch.device) -> None:
    """NoKernel, before anything is allocated, where this device has none for the format."""
    if device.type == "cpu":
        return
    from realkernels.format_kernels import missing  # noqa: PLC0415 - needs triton

    reason = missing(fmt, device)
    if reason:
        raise NoKernel(reason)


LEAST_BITS_ERROR = {8: 0.05, 4: 0.25, 3: 0.45, 2: 0.8}
"""Relative error of a plane beyond which it cannot have been quantised right, by its bits; 16 bits and more: 0.01."""


class FormatAppend:
    """New tokens quantised into a cache, over several layers in turn."""

    def __init__(
        self, name: str, *, arrangement: Arrangement | None = None, shape: AttentionShape | None = None,
        tokens: int, layers: int = 8, device: torch.device, seed: int = 0,
    ) -> None:  # fmt: skip
        self.shape = shape or AttentionShape()
        self.format = format_named(name, arrangement=arrangement or default_arrangement(name))
        self.tokens, self.layers = tokens, layers
        source = torch.Generator(device).manual_seed(seed)
        self.keys, self.values = random_rows(tokens, self.shape, device, source)
        dtype = query_dtype(name, device)
        self.keys, self.values = self.keys.to(dtype), self.values.to(dtype)
        self.page_tokens = 256
        pages = -(-tokens // self.page_tokens)
        if isinstance(self.format, KVarN):
            room = pages * self.page_tokens // self.format.tile_tokens
            kept: dict[str, object] = {"side_tiles": room, "sinks": ()}
        else:
            kept = {}
        self.planes = [
            self.format.allocate(pages, self.page_tokens, self.shape.kv_heads, self.shape.head_dim, device, **kept)
            for _ in range(layers)
        ]
        self.slots = torch.arange(tokens, device=device)

    @property
    def moved_bytes(self) -> float:
        """K and V of a layer's tokens in 16 bits, read, and as they are stored, written."""
        computed = 2 * self.shape.kv_heads * self.shape.head_dim * 2
        return self.tokens * (computed + self.format.token_bytes(self.shape.kv_heads, self.shape.head_dim))

    def run(self) -> None:
        """Every layer."""
        for planes in self.planes:
            self.format.append(planes, self.slots, self.keys, self.values, checked=False)

    def poison(self) -> None:
        """Forget what was appended: 0xFF in every byte, no tile held."""
        for planes in self.planes:
            for tensor in planes.tensors.values():
                tensor.view(torch.uint8).fill_(255)
            if isinstance(self.format, KVarN):
                self.format.release(planes, range(planes.slots // self.format.tile_tokens))

    def finite(self) -> bool:
        """Whether every layer's tokens can be read."""
        return all(
            bool(part.isfinite().all())
            for planes in self.planes
            for part in self.format.unpack(planes, self.slots, checked=False)
        )

    def verify(self) -> float:
        """Run on forgotten planes; relative difference of what the last layer holds from tokens appended one by one.

        Infinite where it is no quantisation of the tokens at all.
        """
        self.poison()
        self.run()
        found = self.format.unpack(self.planes[-1], self.slots, checked=False)
        self.poison()
        alone, step = self.planes[0], max(1, self.tokens // 16)
        for first in range(0, self.tokens, step):
            part = slice(first, first + step)
            self.format.append(alone, self.slots[part], self.keys[part], self.values[part])
        truth = self.format.unpack(alone, self.slots, checked=False)
        self.poison()
        self.run()
        worst = 0.0
        for made, one_by_one, given, bits in zip(found, truth, (self.keys, self.values), self._bits(), strict=True):
            if not relative_error(made, given.double()) < LEAST_BITS_ERROR.get(bits, 0.01):
                return float("inf")
            worst = max(worst, relative_error(made, one_by_one.double()))
        return worst

    def _bits(self) -> tuple[int, int]:
        """Bits of a number of K and of V, scales included, rounded down."""
        names = self.planes[0].parts
        each = self.planes[0].slots * self.shape.kv_heads * self.shape.head_dim
        key, value = (8 * names[f"{plane}_data"].nbytes // each for plane in ("key", "value"))
        return int(key), int(value)
