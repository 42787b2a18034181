"""Dense attention of a chunk of new tokens over a paged cache of any codec, with a scratch that no context enlarges.

The cache is dequantised kv chunk by kv chunk into one buffer of K and of V, in the stored basis and in the query's
type. Each kv chunk is attended to by flash attention, which returns the log-sum-exp, and combined with what came
before: with o and l of the tokens so far (l the logarithm of the sum of exponentials) and o', l' of a kv chunk, both
together have L = log(e^l + e^l') and O = o e^(l - L) + o' e^(l' - L). A query token sees the kv chunks before its own
whole and its own up to itself, so that nothing is masked out but within the one square of query tokens and cached ones
that lies on the diagonal.

The buffer has the query's type because flash attention takes one type. Of normal K and V, rounding to bf16 adds a
relative error of 1.7e-3 (root of the mean square) to the 5e-3 by which 8-bit codes with a scale a group miss them, 7e-3
with a scale a token, 0.1 in 4 bits: a tenth of the squared error at the most, next to nothing in 4 bits. fp16 would add
2e-4, but cannot hold what exceeds 65,504, so that a bf16 model's largest key would have to be known; a model that
computes in fp16 gets fp16.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import log
from typing import NamedTuple

import torch

from realkernels.bounds import check_pages
from realkernels.codecs import Codec, Planes
from realkernels.jit import tl, triton

KV_CHUNK_TOKENS = 8192
"""Tokens that are dequantised at a time: 16 MiB each of K and of V at 4 heads x 256, which a device's L2 may keep."""

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
COMBINED_ELEMENTS = 4096
"""Numbers that a thread block combines."""


@triton.jit(do_not_specialize=["count", "lse_head"])
def _combine(
    part, lse, total, weight, out, count, lse_head,
    HEADS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = number < count
    at = (number.to(tl.int64) * DIM)[:, None] + tl.arange(0, DIM)[None, :]
    mine = tl.load(lse + (number % HEADS).to(tl.int64) * lse_head + number // HEADS, mask=live, other=0.0) * LOG2E
    o = tl.load(part + at, mask=live[:, None], other=0.0).to(tl.float32)
    if not FIRST:
        before = tl.load(weight + number, mask=live, other=0.0)
        top = tl.maximum(mine, before)
        low = tl.minimum(mine, before)
        both = top + tl.log2(1.0 + tl.exp2(low - top))
        o *= tl.exp2(mine - both)[:, None]
        o += tl.load(total + at, mask=live[:, None], other=0.0) * tl.exp2(before - both)[:, None]
        mine = both
    if LAST:
        tl.store(out + at, o.to(out.dtype.element_ty), mask=live[:, None])
    else:
        tl.store(total + at, o, mask=live[:, None])
        tl.store(weight + number, mine, mask=live)


def combine(
    part: torch.Tensor, lse: torch.Tensor, total: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *,
    first: bool, last: bool,
) -> None:  # fmt: skip
    """Combine `part` with `total`, or with nothing where it is the `first` chunk; into `out` where it is the `last`.

    part and out [rows, heads, head_dim] of one 16- or 32-bit type, total float32 of that size, all dense; lse float32
    [heads, rows], natural logarithms; weight float32 [rows, heads] holds those of `total` to base 2. One launch.
    ValueError for sizes that do not belong together.
    """
    rows, heads, dim = part.shape
    right = tuple(lse.shape) == (heads, rows) and tuple(weight.shape) == (rows, heads)
    if not right or any(tuple(each.shape) != (rows, heads, dim) for each in (total, out)) or dim & (dim - 1):
        raise ValueError(
            f"part {tuple(part.shape)}, lse {tuple(lse.shape)}, total {tuple(total.shape)}, weight "
            f"{tuple(weight.shape)} and out {tuple(out.shape)} do not belong together"
        )
    if not all(each.is_contiguous() for each in (part, total, weight, out)) or lse.stride(1) != 1:
        raise ValueError("part, total, weight and out must be dense, rows of lse one behind the other")
    each = max(1, COMBINED_ELEMENTS // dim)
    _combine[(triton.cdiv(rows * heads, each),)](
        part, lse, total, weight, out, rows * heads, lse.stride(0),
        HEADS=heads, DIM=dim, ROWS=each, FIRST=first, LAST=last, num_warps=4,
    )  # fmt: skip


def combine_in_torch(
    part: torch.Tensor, lse: torch.Tensor, total: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *,
    first: bool, last: bool,
) -> None:  # fmt: skip
    """`combine` without a kernel."""
    o, mine = part.float(), lse.T / log(2)
    if not first:
        both = torch.logaddexp2(mine, weight)
        o = o * (mine - both).exp2()[..., None] + total * (weight - both).exp2()[..., None]
        mine = both
    if last:
        out.copy_(o)
    else:
        total.copy_(o)
        weight.copy_(mine)


class Call(NamedTuple):
    """Attention of query tokens `q_from` to `q_to` - 1 over a kv chunk; causal: the last of them sees it to its end."""

    q_from: int
    q_to: int
    causal: bool


def kv_chunks(ctx_tokens: int, chunk_tokens: int) -> Iterator[tuple[int, int]]:
    """First token of each kv chunk and the one behind its last."""
    for first in range(0, ctx_tokens, chunk_tokens):
        yield first, min(first + chunk_tokens, ctx_tokens)


def calls_of(first: int, last: int, *, past_tokens: int, q_tokens: int) -> Iterator[Call]:
    """How query tokens behind `past_tokens` see the kv chunk first .. last - 1; those before it see nothing."""
    if last > past_tokens:
        yield Call(max(first - past_tokens, 0), last - past_tokens, causal=True)
    if last - past_tokens < q_tokens:
        yield Call(max(last - past_tokens, 0), q_tokens, causal=False)


@dataclass(frozen=True, kw_only=True)
class ChunkScratch:
    """All that a chunk's attention needs beside the cache, the queries and the outputs, but for a kv chunk's output."""

    keys: torch.Tensor
    """[kv_chunk_tokens, kv_heads, head_dim]"""
    values: torch.Tensor
    total: torch.Tensor
    """float32 [q_tokens, query_heads, head_dim]"""
    weight: torch.Tensor
    """float32 [q_tokens, query_heads]"""

    @staticmethod
    def allocate(
        *, kv_chunk_tokens: int, q_tokens: int, query_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype,
        device: torch.device,
    ) -> "ChunkScratch":  # fmt: skip
        """For chunks of up to `q_tokens` tokens; what is in it does not matter."""
        chunk = (kv_chunk_tokens, kv_heads, head_dim)
        return ChunkScratch(
            keys=torch.empty(chunk, dtype=dtype, device=device),
            values=torch.empty(chunk, dtype=dtype, device=device),
            total=torch.empty(q_tokens, query_heads, head_dim, dtype=torch.float32, device=device),
            weight=torch.empty(q_tokens, query_heads, dtype=torch.float32, device=device),
        )

    @property
    def kv_chunk_tokens(self) -> int:
        """Tokens of a kv chunk."""
        return self.keys.shape[0]

    @property
    def bytes(self) -> int:
        """Of all four: no context enters."""
        return sum(part.nbytes for part in (self.keys, self.values, self.total, self.weight))


def flash_chunk(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`softmax_chunk` by torch's flash attention, on a GPU: its operator takes fewer KV heads and masks lower right."""
    heads_first = [part.transpose(0, 1)[None] for part in (query, keys, values)]
    output, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        *heads_first, 0.0, causal and query.shape[0] > 1, scale=query.shape[-1] ** -0.5
    )
    return output[0].transpose(0, 1).contiguous(), lse[0]


def softmax_chunk(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention written out in float32: (output [q_tokens, heads, dim], log-sum-exp float32 [heads, q_tokens]).

    query [q_tokens, heads, dim], keys and values [tokens, kv_heads, dim]; causal: the last query sees the last token.
    """
    group = query.shape[1] // keys.shape[1]
    keys, values = (part.float().repeat_interleave(group, dim=1) for part in (keys, values))
    scores = torch.einsum("rhd,thd->hrt", query.float(), keys) * query.shape[-1] ** -0.5
    if causal:
        rows, tokens = scores.shape[1:]
        hidden = torch.ones(rows, tokens, dtype=torch.bool, device=query.device).triu(tokens - rows + 1)
        scores = scores.masked_fill(hidden, float("-inf"))
    lse = scores.logsumexp(dim=-1)
    output = torch.einsum("hrt,thd->rhd", (scores - lse[..., None]).exp(), values)
    return output.to(query.dtype).contiguous(), lse


def attend_chunk(
    query: torch.Tensor, dequantise: Callable[..., None], table: torch.Tensor, out: torch.Tensor,
    scratch: ChunkScratch, *, past_tokens: int,
) -> None:  # fmt: skip
    """Causal attention of a chunk's tokens over the `past_tokens` before them and over themselves, into `out`.

    query and out [q_tokens, query_heads, head_dim], dense, in the stored basis; the chunk's own K and V are in the
    cache already. dequantise(table, keys, values, first=, last=) writes tokens of the sequence whose pages `table`
    names. Nothing waits for the device; page numbers are trusted (`check_chunk`). ValueError, before anything is
    launched, for sizes that do not fit.
    """
    q_tokens = query.shape[0]
    _check_scratch(query, out, scratch)
    if past_tokens < 0 or q_tokens < 1:
        raise ValueError(
            f"a chunk of {q_tokens} tokens behind {past_tokens}: give at least one token and no negative past"
        )
    on_gpu = query.device.type == "cuda"
    attend, add = (flash_chunk, combine) if on_gpu else (softmax_chunk, combine_in_torch)
    for first, last in kv_chunks(past_tokens + q_tokens, scratch.kv_chunk_tokens):
        dequantise(table, scratch.keys, scratch.values, first=first, last=last)
        keys, values = scratch.keys[: last - first], scratch.values[: last - first]
        for at, to, causal in calls_of(first, last, past_tokens=past_tokens, q_tokens=q_tokens):
            part, lse = attend(query[at:to], keys, values, causal=causal)
            add(part, lse, scratch.total[at:to], scratch.weight[at:to], out[at:to], first=first == 0, last=causal)


def reference_dequantiser(codec: Codec, planes: Planes) -> Callable[..., None]:
    """What `kernels.dequantise.dequantiser` gives, by the codec's reference in torch."""
    return partial(_in_torch, codec, planes)


def _in_torch(
    codec: Codec, planes: Planes, table: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, first: int,
    last: int,
) -> None:  # fmt: skip
    token = torch.arange(first, last, device=table.device)
    slots = table[token // planes.page_tokens].long() * planes.page_tokens + token % planes.page_tokens
    for rows, made in zip((keys, values), codec.dequantise(planes, slots, checked=False), strict=True):
        rows[: last - first].copy_(made)


def check_chunk(
    codec: Codec, planes: Planes, table: torch.Tensor, *, q_tokens: int, ctx_tokens: int, kv_chunk_tokens: int
) -> None:  # fmt: skip
    """ValueError, with nothing launched, where a chunk's attention cannot run; waits for the device.

    `q_tokens` new tokens end a context of `ctx_tokens`, whose pages `table` int32 [pages] names; a kv chunk is a
    multiple of a page and of a tile.
    """
    if not 1 <= q_tokens <= ctx_tokens:
        raise ValueError(f"{q_tokens} new tokens do not end a context of {ctx_tokens} tokens")
    for what, size in (("page", planes.page_tokens), ("tile", codec.tile_tokens)):
        if kv_chunk_tokens < 1 or kv_chunk_tokens % size:
            raise ValueError(f"a kv chunk of {kv_chunk_tokens} tokens is no multiple of a {what} of {size}")
    try:
        lengths = torch.tensor([ctx_tokens], dtype=torch.int32, device=table.device)
        check_pages(table[None], lengths, pages=planes.pages, page_tokens=planes.page_tokens)
    except IndexError as wrong:
        raise ValueError(str(wrong)) from None


def _check_scratch(query: torch.Tensor, out: torch.Tensor, scratch: ChunkScratch) -> None:
    q_tokens, heads, head_dim = query.shape
    if tuple(out.shape) != tuple(query.shape) or out.dtype != query.dtype or not out.is_contiguous():
        raise ValueError(f"out {tuple(out.shape)} {out.dtype} is not dense as query {tuple(query.shape)} {query.dtype}")
    if scratch.keys.dtype != query.dtype or scratch.keys.shape[2] != head_dim:
        raise ValueError(
            f"a scratch of {scratch.keys.dtype} {tuple(scratch.keys.shape)} does not take kv chunks for queries "
            f"{query.dtype} {tuple(query.shape)}"
        )
    if scratch.total.shape[0] < q_tokens or scratch.total.shape[1] != heads or heads % scratch.keys.shape[1]:
        raise ValueError(
            f"a scratch for {scratch.total.shape[0]} tokens of {scratch.total.shape[1]} heads over "
            f"{scratch.keys.shape[1]} KV heads does not take {q_tokens} tokens of {heads}"
        )
