"""Dense attention of a chunk of new tokens over a paged cache of any format, with a scratch that no context enlarges.

The cache is unpacked piece by piece into one buffer of K and of V, in the stored basis and in the query's type. Each
piece is attended to by flash attention, which returns the log-sum-exp, and folded into what came before. A row sees
the pieces before its own token whole and its own piece up to itself, so that no product is masked out but within the
one square of rows and tokens that lies on the diagonal.

The buffer has the query's type because flash attention takes one type. Of normal K and V, rounding to bf16 adds a
relative error of 1.7e-3 (root of the mean square) to the 5e-3 by which 8-bit codes with a scale a group miss them, 7e-3
with a scale a token, 0.1 in 4 bits: a tenth of the squared error at the most, next to nothing in 4 bits. fp16 would add
2e-4, but cannot hold what exceeds 65,504, so that a bf16 model's largest key would have to be known; a model that
computes in fp16 gets fp16.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from realkernels.bounds import check_pages
from realkernels.chunk_cpu import fold_in_torch, softmax_piece
from realkernels.formats import Format, Planes

PIECE_TOKENS = 8192
"""Tokens that are unpacked at a time: 16 MiB each of K and of V at 4 heads x 256, which a device's L2 may keep."""

Attend = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""(query [rows, heads, dim], keys, values [tokens, kv heads, dim], causal=) -> output, dense, and log-sum-exp
[heads, rows]."""


class Call(NamedTuple):
    """Attention of rows `rows_from` to `rows_to` - 1 over a piece; causal: the last of them sees it to its end."""

    rows_from: int
    rows_to: int
    causal: bool


def pieces(ctx_tokens: int, piece_tokens: int) -> Iterator[tuple[int, int]]:
    """First token of each piece and the one behind its last."""
    for first in range(0, ctx_tokens, piece_tokens):
        yield first, min(first + piece_tokens, ctx_tokens)


def calls_of(first: int, last: int, *, past: int, rows: int) -> Iterator[Call]:
    """How the rows of a chunk behind `past` tokens see the piece first .. last - 1; of rows before it, nothing."""
    if last > past:
        yield Call(max(first - past, 0), last - past, causal=True)
    if last - past < rows:
        yield Call(max(last - past, 0), rows, causal=False)


@dataclass(frozen=True, kw_only=True)
class ChunkScratch:
    """All that a chunk's attention needs beside the cache, the queries and the outputs, but for a piece's output."""

    keys: torch.Tensor
    """[piece_tokens, kv_heads, head_dim]"""
    values: torch.Tensor
    total: torch.Tensor
    """float32 [rows, query_heads, head_dim]"""
    weight: torch.Tensor
    """float32 [rows, query_heads]"""

    @staticmethod
    def allocate(
        *, piece_tokens: int, rows: int, query_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype,
        device: torch.device,
    ) -> "ChunkScratch":  # fmt: skip
        """For chunks of up to `rows` rows; what is in it does not matter."""
        piece = (piece_tokens, kv_heads, head_dim)
        return ChunkScratch(
            keys=torch.empty(piece, dtype=dtype, device=device),
            values=torch.empty(piece, dtype=dtype, device=device),
            total=torch.empty(rows, query_heads, head_dim, dtype=torch.float32, device=device),
            weight=torch.empty(rows, query_heads, dtype=torch.float32, device=device),
        )

    @property
    def piece_tokens(self) -> int:
        """Tokens of a piece."""
        return self.keys.shape[0]

    @property
    def bytes(self) -> int:
        """Of all four: no context enters."""
        return sum(part.nbytes for part in (self.keys, self.values, self.total, self.weight))


def flash_piece(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Torch's flash attention and nothing else, on a GPU: its operator takes fewer KV heads and masks lower right."""
    heads_first = [part.transpose(0, 1)[None] for part in (query, keys, values)]
    output, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        *heads_first, 0.0, causal and query.shape[0] > 1, scale=query.shape[-1] ** -0.5
    )
    return output[0].transpose(0, 1).contiguous(), lse[0]


def attend_chunk(
    query: torch.Tensor, expand: Callable[..., None], table: torch.Tensor, out: torch.Tensor, scratch: ChunkScratch, *,
    past: int, attend: Attend | None = None, fold: Callable[..., None] | None = None,
) -> None:  # fmt: skip
    """Causal attention of the chunk's rows over the `past` tokens before them and over themselves, into `out`.

    query and out [rows, query_heads, head_dim], dense, in the stored basis; the chunk's own K and V are in the cache
    already. expand(table, keys, values, first=, last=) unpacks tokens of the sequence whose pages `table` names.
    `attend` and `fold` are flash attention and a kernel on a GPU, written out elsewhere, unless given. Nothing waits
    for the device; page numbers are trusted (`check_chunk`). ValueError, before anything is launched, for sizes that do
    not fit.
    """
    rows = query.shape[0]
    _check_scratch(query, out, scratch)
    if past < 0 or rows < 1:
        raise ValueError(f"a chunk of {rows} rows behind {past} tokens: give at least one row and no negative past")
    on_gpu = query.device.type == "cuda"
    attend = attend or (flash_piece if on_gpu else softmax_piece)
    fold = fold or (_fold_kernel() if on_gpu else fold_in_torch)
    for first, last in pieces(past + rows, scratch.piece_tokens):
        expand(table, scratch.keys, scratch.values, first=first, last=last)
        keys, values = scratch.keys[: last - first], scratch.values[: last - first]
        for at, to, causal in calls_of(first, last, past=past, rows=rows):
            part, lse = attend(query[at:to], keys, values, causal=causal)
            fold(
                part, lse, scratch.total[at:to], scratch.weight[at:to], out[at:to], first=first == 0, last=causal
            )  # fmt: skip


def _fold_kernel() -> Callable[..., None]:
    from realkernels.fold import fold  # noqa: PLC0415 - needs triton

    return fold


def check_chunk(
    fmt: Format, planes: Planes, table: torch.Tensor, *, rows: int, ctx_tokens: int, piece_tokens: int
) -> None:  # fmt: skip
    """ValueError, with nothing launched, where a chunk's attention cannot run; waits for the device.

    `rows` new tokens end a context of `ctx_tokens`, whose pages `table` int32 [pages] names; a piece is a multiple of
    a page and of a tile.
    """
    if not 1 <= rows <= ctx_tokens:
        raise ValueError(f"{rows} rows do not end a context of {ctx_tokens} tokens")
    for what, size in (("page", planes.page_tokens), ("tile", fmt.tile_tokens)):
        if piece_tokens < 1 or piece_tokens % size:
            raise ValueError(f"a piece of {piece_tokens} tokens is no multiple of a {what} of {size}")
    try:
        lengths = torch.tensor([ctx_tokens], dtype=torch.int32, device=table.device)
        check_pages(table[None], lengths, pages=planes.pages, page_tokens=planes.page_tokens)
    except IndexError as wrong:
        raise ValueError(str(wrong)) from None


def _check_scratch(query: torch.Tensor, out: torch.Tensor, scratch: ChunkScratch) -> None:
    rows, heads, head_dim = query.shape
    if tuple(out.shape) != tuple(query.shape) or out.dtype != query.dtype or not out.is_contiguous():
        raise ValueError(f"out {tuple(out.shape)} {out.dtype} is not dense as query {tuple(query.shape)} {query.dtype}")
    if scratch.keys.dtype != query.dtype or scratch.keys.shape[2] != head_dim:
        raise ValueError(
            f"a scratch of {scratch.keys.dtype} {tuple(scratch.keys.shape)} does not take pieces for queries "
            f"{query.dtype} {tuple(query.shape)}"
        )
    if scratch.total.shape[0] < rows or scratch.total.shape[1] != heads or heads % scratch.keys.shape[1]:
        raise ValueError(
            f"a scratch for {scratch.total.shape[0]} rows of {scratch.total.shape[1]} heads over "
            f"{scratch.keys.shape[1]} KV heads does not take {rows} rows of {heads}"
        )
