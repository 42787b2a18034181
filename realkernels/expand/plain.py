"""Copies tokens of a paged cache of 16 or 32 bits to where they follow one another."""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from realkernels.expand.piece import Plane, check_piece, page_at, power_of_two_below

ELEMENTS = 8192


@triton.jit(do_not_specialize=["first", "tokens"])
def _expand_plain(
    key_data, value_data, pages, keys, values, first, tokens, KEY: tl.constexpr, VALUE: tl.constexpr,
    PAGE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0) * TOKENS
    head = tl.program_id(1)
    page = page_at(pages, first + start, PAGE)
    row = start + tl.arange(0, TOKENS)
    live = (row < tokens)[:, None]
    inside = ((first + row) % PAGE)[:, None]
    column = tl.arange(0, DIM)[None, :]
    to = ((row.to(tl.int64) * HEADS + head) * DIM)[:, None] + column
    if tl.program_id(2) == 0:
        at = KEY[0] + page * KEY[1] + head * KEY[2] + inside * KEY[3] + column
        tl.store(keys + to, tl.load(key_data + at, mask=live).to(keys.dtype.element_ty), mask=live)
    else:
        at = VALUE[0] + page * VALUE[1] + head * VALUE[2] + inside * VALUE[3] + column
        tl.store(values + to, tl.load(value_data + at, mask=live).to(values.dtype.element_ty), mask=live)


def expand_plain(
    views: Mapping[str, torch.Tensor], table: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, first: int,
    last: int, page_tokens: int,
) -> None:  # fmt: skip
    """Tokens first .. last - 1 of one sequence into the first rows of keys and values; as `expand_rows`."""
    _, kv_heads, _, head_dim = views["key_data"].shape
    check_piece(keys, values, table, first=first, last=last, size=(kv_heads, head_dim), page_tokens=page_tokens)
    if head_dim & (head_dim - 1):
        raise ValueError(f"head_dim is {head_dim}: the kernel takes powers of two")
    key, value = (Plane.of(views[name]) for name in ("key_data", "value_data"))
    tokens = power_of_two_below(page_tokens, max(1, ELEMENTS // head_dim))
    _expand_plain[(triton.cdiv(last - first, tokens), kv_heads, 2)](
        key.base, value.base, table, keys, values, first, last - first, KEY=key.way, VALUE=value.way, PAGE=page_tokens,
        HEADS=kv_heads, DIM=head_dim, TOKENS=tokens, num_warps=4,
    )  # fmt: skip
