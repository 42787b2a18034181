"""Decode attention over a paged cache of any codec, as it is timed and checked.

One call is what a layer of a model does with its new tokens' queries: rotate them where the codec is rotated, attend
over every cached token, rotate the result back. The rotations are small matrix products and part of the time.
"""

from collections.abc import Callable
from functools import partial

import torch

from realkernels.caches.paged import NoKernel, PagedCache
from realkernels.codecs import Arrangement, Codec, codec_named, default_arrangement
from realkernels.kernels.in_torch import attend_blocks
from realkernels.shape import AttentionShape
from realkernels.timed.call import TimedCall, relative_error

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
    """The codec's rotations as matrices [head_dim, head_dim]; None where it leaves a side as it is."""

    def __init__(self, codec: Codec, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        unit = torch.eye(head_dim, device=device)
        queries, outputs = codec.rotate_query(unit), codec.rotate_output(unit)
        self.query = None if torch.equal(queries, unit) else queries.to(dtype)
        self.output = None if torch.equal(outputs, unit) else outputs.to(dtype)


def rotate(rows: torch.Tensor, matrix: torch.Tensor, out: torch.Tensor) -> None:
    """Rows [..., head_dim] times `matrix`, into `out`."""
    torch.mm(rows.flatten(0, -2), matrix, out=out.view(-1, out.shape[-1]))


class AttendDecode(TimedCall):
    """Attention of the newest `q_tokens` tokens of `batch` sequences over `ctx_tokens` each, those included.

    NoKernel where this device has none for the codec; ValueError for sizes that the codec does not take; RuntimeError
    of torch where the caches do not fit.
    """

    def __init__(
        self, codec_name: str, *, arrangement: Arrangement | None = None, shape: AttentionShape | None = None,
        batch: int = 1, ctx_tokens: int, q_tokens: int = 1, caches: int | None = None, device: torch.device,
        seed: int = 0,
    ) -> None:  # fmt: skip
        self.shape = shape or AttentionShape()
        self.codec = codec_named(codec_name, arrangement=arrangement or default_arrangement(codec_name))
        self.batch, self.ctx_tokens, self.q_tokens = batch, ctx_tokens, q_tokens
        if not 1 <= q_tokens <= ctx_tokens:
            raise ValueError(f"{q_tokens} query tokens do not end a context of {ctx_tokens} tokens")
        self.token_bytes = self.codec.token_bytes(self.shape.kv_heads, self.shape.head_dim)
        self.calls = caches or caches_beyond(self.cache_bytes, device)
        self.moved_bytes = float(self.cache_bytes)
        self.flops = 4.0 * self.shape.query_heads * self.shape.head_dim * batch
        self.flops *= q_tokens * ctx_tokens - q_tokens * (q_tokens - 1) / 2
        dtype = query_dtype(codec_name, device)
        size = (batch, q_tokens, self.shape.query_heads, self.shape.head_dim)
        self.query = torch.randn(size, dtype=dtype, device=device)
        self.output = torch.empty_like(self.query)
        self._rotation = Rotation(self.codec, self.shape.head_dim, dtype, device)
        self._rotated = self.query if self._rotation.query is None else torch.empty_like(self.query)
        self._stored = self.output if self._rotation.output is None else torch.empty_like(self.query)
        _refuse(self.codec, device)
        self.cache = PagedCache.fill(
            self.codec, self.shape, sequences=batch * self.calls, tokens=ctx_tokens, device=device, seed=seed
        )  # fmt: skip
        self._attend = self._attentions(device)

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
        parts = [range(at * self.batch, (at + 1) * self.batch) for at in range(self.calls)]
        if device.type == "cpu":
            return [partial(attend_blocks, self.cache, part) for part in parts]
        from realkernels.kernels.decode import attentions  # noqa: PLC0415 - needs triton

        return attentions(self.cache, parts, q_tokens=self.q_tokens)

    def run(self) -> None:
        """One call a cache."""
        for attend in self._attend:
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

    def error(self) -> float:
        """Of the output as it is, which belongs to the last cache; infinite where something is not finite."""
        if not self.finite():
            return float("inf")
        group, last = self.shape.group, (self.calls - 1) * self.batch
        worst = 0.0
        for row, kv_head in {(0, 0), (self.batch - 1, self.shape.kv_heads - 1)}:
            heads = slice(kv_head * group, (kv_head + 1) * group)
            for token in {0, self.q_tokens - 1}:
                seen = self.ctx_tokens - self.q_tokens + token + 1
                truth = self.cache.attend(self.query[row, token, heads], last + row, kv_head, seen=seen)
                worst = max(worst, relative_error(self.output[row, token, heads], truth))
        return worst


def _refuse(codec: Codec, device: torch.device) -> None:
    """NoKernel, before anything is allocated, where this device has none for the codec."""
    if device.type == "cpu":
        return
    from realkernels.kernels.decode import missing  # noqa: PLC0415 - needs triton

    reason = missing(codec, device)
    if reason:
        raise NoKernel(reason)
