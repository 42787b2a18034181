"""Attention over a paged cache of any codec, as it is timed and checked; decode attention by its codec's fused kernel.

One call is what a layer of a model does with its new tokens' queries: rotate them where the codec is rotated, attend
over every cached token, rotate the result back. The rotations are small matrix products and part of the time. A codec
that declares no form has no kernel on a GPU: `missing` says so, nothing stands in.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import torch

from realkernels.bounds import check_pages
from realkernels.caches.paged import PAGE_TOKENS, NoKernel, PagedCache
from realkernels.codecs import Arrangement, Codec, codec_named, codec_names, default_arrangement
from realkernels.jit import TritonError
from realkernels.kernels.in_torch import attend_blocks
from realkernels.kernels.split_kv import PlanCase, TilePlan, alignment
from realkernels.shape import AttentionShape
from realkernels.timed.call import TimedCall, relative_error, some_rows

BEYOND_CACHES = {"cuda": 512 * 2**20, "cpu": 16 * 2**20}
"""Bytes that the caches of a run have together: several times what a device keeps on its chip."""

MOST_CACHES = {"cuda": 64, "cpu": 2}


def caches_beyond(cache_bytes: float, device: torch.device) -> int:
    """Caches that a run takes in turn, so that what the device keeps of one is gone before it is read again."""
    return max(1, min(MOST_CACHES[device.type], round(BEYOND_CACHES[device.type] / cache_bytes)))


def query_dtype(name: str, device: torch.device) -> torch.dtype:
    """Of queries and outputs: what the model computes in."""
    if device.type == "cpu":
        return torch.float32
    return torch.float16 if name == "fp16" else torch.bfloat16


def own_codec(name: str, arrangement: Arrangement | None) -> Codec:
    """The codec called `name`, as this project's own kernels keep it unless an arrangement is asked for."""
    return codec_named(name, arrangement=arrangement or default_arrangement(name))


class CacheAttention(TimedCall):
    """Attention of the newest `q_tokens` tokens of `batch` sequences over `ctx_tokens` each, those included.

    ValueError for sizes that the codec does not take; RuntimeError of torch where the caches do not fit.
    """

    def __init__(
        self, codec: Codec, shape: AttentionShape, *, batch: int, ctx_tokens: int, q_tokens: int, caches: int | None,
        device: torch.device,
    ) -> None:  # fmt: skip
        if not 1 <= q_tokens <= ctx_tokens:
            raise ValueError(f"{q_tokens} new tokens do not end a context of {ctx_tokens} tokens")
        self.codec, self.shape, self.batch, self.ctx_tokens, self.q_tokens = codec, shape, batch, ctx_tokens, q_tokens
        self.cache_bytes = batch * ctx_tokens * codec.token_bytes(shape.kv_heads, shape.head_dim)
        """K and V of one cache with their scales, what lies beside apart."""
        self.calls = caches or caches_beyond(self.cache_bytes, device)
        self.flops = 4.0 * shape.query_heads * shape.head_dim * batch
        self.flops *= q_tokens * ctx_tokens - q_tokens * (q_tokens - 1) / 2
        self.cache = PagedCache.fill(codec, shape, sequences=batch * self.calls, tokens=ctx_tokens, device=device)
        size = (batch, q_tokens, shape.query_heads, shape.head_dim)
        self.query = torch.randn(size, dtype=query_dtype(codec.name, device), device=device)
        self.output = torch.empty_like(self.query)
        self._into, self._out_of = (self._matrix(rotated) for rotated in (codec.rotate_query, codec.rotate_output))
        """Rotations [head_dim, head_dim] of queries and of outputs; None where the codec leaves them as they are."""
        self._rotated = self.query if self._into is None else torch.empty_like(self.query)
        self._stored = self.output if self._out_of is None else torch.empty_like(self.query)

    def _matrix(self, rotated: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor | None:
        unit = torch.eye(self.shape.head_dim, device=self.query.device)
        return None if torch.equal(rotated(unit), unit) else rotated(unit).to(self.query.dtype)

    @property
    def rotates(self) -> str:
        """Which products are part of a call: of queries, of outputs, of both, or none."""
        sides = (("queries", self._into), ("outputs", self._out_of))
        return " and ".join(name for name, matrix in sides if matrix is not None) or "none"

    @abstractmethod
    def attend(self, number: int, query: torch.Tensor, output: torch.Tensor) -> None:
        """Over cache `number`, in the stored basis."""

    def run(self) -> None:
        """One call a cache."""
        for number in range(self.calls):
            if self._into is not None:
                torch.mm(self.query.flatten(0, -2), self._into, out=self._rotated.flatten(0, -2))
            self.attend(number, self._rotated, self._stored)
            if self._out_of is not None:
                torch.mm(self._stored.flatten(0, -2), self._out_of, out=self.output.flatten(0, -2))

    def poison(self) -> None:
        """NaN in the output, fresh queries."""
        self.query.normal_()
        for part in (self.output, self._stored):
            part.fill_(float("nan"))

    def error(self) -> float:
        """Of the output as it is, which belongs to the last cache; infinite where something is not finite."""
        if not self.finite():
            return float("inf")
        group, last, worst = self.shape.group, (self.calls - 1) * self.batch, 0.0
        for row, kv_head in {(0, 0), (self.batch - 1, self.shape.kv_heads - 1)}:
            heads = slice(kv_head * group, (kv_head + 1) * group)
            for token in some_rows(self.q_tokens):
                seen = self.ctx_tokens - self.q_tokens + token + 1
                truth = self.cache.attend(self.query[row, token, heads], last + row, kv_head, seen=seen)
                worst = max(worst, relative_error(self.output[row, token, heads], truth))
        return worst


class AttendDecode(CacheAttention):
    """Decode attention over a paged cache; NoKernel where this device has none for the codec."""

    def __init__(
        self, codec_name: str, *, arrangement: Arrangement | None = None, shape: AttentionShape | None = None,
        batch: int = 1, ctx_tokens: int, q_tokens: int = 1, caches: int | None = None, device: torch.device,
    ) -> None:  # fmt: skip
        codec = own_codec(codec_name, arrangement)
        reason = "" if device.type == "cpu" else missing(codec, device)
        if reason:
            raise NoKernel(reason)
        super().__init__(
            codec, shape or AttentionShape(), batch=batch, ctx_tokens=ctx_tokens, q_tokens=q_tokens, caches=caches,
            device=device,
        )  # fmt: skip
        self.moved_bytes = float(self.cache_bytes)
        parts = [range(at * batch, (at + 1) * batch) for at in range(self.calls)]
        if device.type == "cpu":
            self._attend = [partial(attend_blocks, self.cache, part) for part in parts]
        else:
            self._attend = attentions(self.cache, parts, q_tokens=q_tokens)

    def attend(self, number: int, query: torch.Tensor, output: torch.Tensor) -> None:
        """By the codec's kernel, or in torch."""
        self._attend[number](query, output)


# Fused kernels


def attended() -> list[str]:
    """Names of the codecs that decode attention reads."""
    return [name for name in codec_names() if codec_named(name).decode_form is not None]


def missing(codec: Codec, device: torch.device) -> str:
    """Empty, or in one line why no kernel reads this codec on `device`."""
    form = codec.decode_form
    if form is None:
        return f"no fused kernel reads {codec.name}: there are {', '.join(attended())}"
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else form.least_capability
    if capability < form.least_capability:
        needs, has = (".".join(str(part) for part in each) for each in (form.least_capability, capability))
        return f"the kernel of {codec.name} needs compute capability {needs}, this device has {has}"
    return ""


def plan_for(cache: PagedCache, q_rows: int) -> TilePlan:
    """How the codec's kernel is divided into thread blocks for `q_rows` query rows of a KV head."""
    views = cache.codec.views(cache.planes)
    case = PlanCase.on(
        cache.table.device, q_rows=q_rows, head_dim=cache.shape.head_dim, tile_tokens=cache.codec.tile_tokens,
        aligned=alignment(views["key_data"], views["value_data"]),
        per_token="key_scale" in views and views["key_scale"].dim() > 1,
    )  # fmt: skip
    return cache.codec.decode_form.plan(case)


def attentions(
    cache: PagedCache, parts: Sequence[range], *, q_tokens: int
) -> list[Callable[[torch.Tensor, torch.Tensor], object]]:
    """A call for each part of the cache's sequences, all of one size; each takes (query, out) in the stored basis.

    IndexError, before anything is launched, for a page table that leaves the planes.
    """
    form, shape, device = cache.codec.decode_form, cache.shape, cache.table.device
    plan, batch = plan_for(cache, shape.group * q_tokens), len(parts[0])
    workspace = plan.workspace(
        batch=batch, q_tokens=q_tokens, **vars(shape), tokens=cache.tokens, other_splits=form.other_splits,
        device=device,
    )  # fmt: skip
    views = cache.codec.views(cache.planes)
    lengths = torch.full((batch,), cache.tokens, dtype=torch.int32, device=device)
    for part in parts:
        check_pages(
            cache.table[part.start : part.stop], lengths, pages=cache.planes.pages, page_tokens=cache.planes.page_tokens
        )

    def call(table: torch.Tensor, query: torch.Tensor, out: torch.Tensor) -> None:
        try:
            form.attend(
                query, views, table, lengths, out, workspace, plan=plan, page_tokens=PAGE_TOKENS,
                softmax_scale=shape.head_dim**-0.5,
            )  # fmt: skip
        except TritonError as wrong:
            first = (str(wrong).strip() or type(wrong).__name__).splitlines()[0]
            raise NoKernel(f"the kernel of {cache.codec.name} does not start here: {first}") from wrong

    return [partial(call, cache.table[part.start : part.stop]) for part in parts]
