"""Unpacks formats that quantise each token on its own: codes of 8 or 4 bits with a scale a head or a group of 32.

A program has some tokens of one page, one head and one plane. Its rows are the (token, group) pairs; a row's codes lie
one behind the other, and so do its numbers. Bytes are all that it costs: codes and scales read, numbers written.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from realkernels.expand.codes import CENTRED, NIBBLES, numbers
from realkernels.expand.piece import Plane, check_piece, page_at, power_of_two_below

ELEMENTS = 8192
"""Numbers that a program writes."""

MOST_TOKENS = 32


@triton.jit
def _plane(
    data, scales, zeros, table, out, page, inside, head, row, live,
    KIND: tl.constexpr, DATA: tl.constexpr, SCALE: tl.constexpr, ZERO: tl.constexpr, PAGED: tl.constexpr,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Rows [ROWS] of one plane: `inside` is their token within the page, `row` their token within `out`."""
    group = tl.arange(0, inside.shape[0]) % GROUPS
    if PAGED:
        at = SCALE[0] + page * SCALE[1] + head * SCALE[2] + inside * SCALE[3]
        if GROUPS > 1:
            at += group * SCALE[4]
        scale = tl.load(scales + at, mask=live, other=0.0)[:, None]
    else:
        scale = tl.load(scales)
    if scale.dtype == tl.float16:
        scale = scale.to(tl.float32)
    zero = 0.0
    if len(ZERO) > 0:
        at = ZERO[0] + page * ZERO[1] + head * ZERO[2] + inside * ZERO[3]
        zero = tl.load(zeros + at, mask=live, other=0.0).to(tl.float32)[:, None]
    at = DATA[0] + page * DATA[1] + head * DATA[2] + inside * DATA[3]
    if GROUPS > 1:
        at += group * DATA[4]
    to = out + (((row.to(tl.int64) * HEADS + head) * GROUPS + group) * WIDTH)[:, None]
    if KIND >= NIBBLES:
        half: tl.constexpr = WIDTH // 2
        column = tl.arange(0, half)[None, :]
        codes = tl.load(data + at[:, None] + column, mask=live[:, None], other=0)
        low = numbers(codes & 15, scale, zero, table, KIND).to(out.dtype.element_ty)
        high = numbers(codes >> 4, scale, zero, table, KIND).to(out.dtype.element_ty)
        if KIND == CENTRED:
            tl.store(to + column, low, mask=live[:, None])
            tl.store(to + column + half, high, mask=live[:, None])
        else:
            both = tl.join(low, high).reshape(low.shape[0], WIDTH)
            tl.store(to + tl.arange(0, WIDTH)[None, :], both, mask=live[:, None])
    else:
        column = tl.arange(0, WIDTH)[None, :]
        codes = tl.load(data + at[:, None] + column, mask=live[:, None], other=0)
        made = numbers(codes, scale, zero, table, KIND)
        tl.store(to + column, made.to(out.dtype.element_ty), mask=live[:, None])


@triton.jit(do_not_specialize=["first", "tokens"])
def _expand_rows(
    key_data, key_scale, value_data, value_scale, value_zero, centroids, pages, keys, values, first, tokens,
    KEY_KIND: tl.constexpr, VALUE_KIND: tl.constexpr, KEY: tl.constexpr, KEY_SCALE: tl.constexpr,
    VALUE: tl.constexpr, VALUE_SCALE: tl.constexpr, VALUE_ZERO: tl.constexpr, PAGED: tl.constexpr, PAGE: tl.constexpr,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0) * TOKENS
    head = tl.program_id(1)
    page = page_at(pages, first + start, PAGE)
    row = start + tl.arange(0, TOKENS * GROUPS) // GROUPS
    live = row < tokens
    inside = (first + row) % PAGE
    if tl.program_id(2) == 0:
        _plane(
            key_data, key_scale, value_zero, centroids, keys, page, inside, head, row, live,
            KEY_KIND, KEY, KEY_SCALE, (), PAGED, HEADS, GROUPS, WIDTH,
        )  # fmt: skip
    else:
        _plane(
            value_data, value_scale, value_zero, centroids, values, page, inside, head, row, live,
            VALUE_KIND, VALUE, VALUE_SCALE, VALUE_ZERO, PAGED, HEADS, GROUPS, WIDTH,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Codes:
    """What the planes of K and of V hold (`realkernels/expand/codes.py`), and the names of their scales."""

    key: int
    value: int
    key_scale: str = "key_scale"
    value_zero: str = ""
    groups: int = 1
    """Rows with a scale of their own that a head has, where it is not the whole head."""
    of_layer: bool = False
    """Whether the scales are one a plane."""


def expand_rows(
    views: Mapping[str, torch.Tensor], codes: Codes, table: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *,
    first: int, last: int, page_tokens: int, centroids: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Tokens first .. last - 1 of one sequence into the first rows of keys and values, as `Format.read` sees them.

    views by name, [page, head, token, ...] with any strides, their last axis dense; table int32 [pages of the
    sequence]; keys and values [at least last - first, kv_heads, head_dim] fp16, bf16 or fp32. centroids fp32 [16] where
    codes are of that kind. One launch, no host synchronisation; page numbers are trusted. ValueError for what does not
    fit.
    """
    data = views["key_data"]
    kv_heads = data.shape[1]
    head_dim = data.shape[-1] * (2 if codes.key >= NIBBLES.value else 1) * codes.groups
    check_piece(keys, values, table, first=first, last=last, size=(kv_heads, head_dim), page_tokens=page_tokens)
    axes = 4 if codes.groups > 1 else 3
    key, value = (Plane.of(views[name], axes) for name in ("key_data", "value_data"))
    scale_axes = 0 if codes.of_layer else axes
    key_scale, value_scale = (Plane.of(views[name], scale_axes) for name in (codes.key_scale, "value_scale"))
    zero = Plane.of(views[codes.value_zero]) if codes.value_zero else Plane(value_scale.base, ())
    width = head_dim // codes.groups
    if any(part.stride(-1) != 1 for part in (views["key_data"], views["value_data"])) or width & (width - 1):
        raise ValueError(f"codes of {width} numbers must lie one behind the other, and be a power of two")
    tokens = power_of_two_below(page_tokens, min(MOST_TOKENS, max(1, ELEMENTS // head_dim)))
    _expand_rows[(triton.cdiv(last - first, tokens), kv_heads, 2)](
        key.base, key_scale.base, value.base, value_scale.base, zero.base,
        value_scale.base if centroids is None else centroids, table, keys, values, first, last - first,
        KEY_KIND=codes.key, VALUE_KIND=codes.value, KEY=key.way, KEY_SCALE=key_scale.way, VALUE=value.way,
        VALUE_SCALE=value_scale.way, VALUE_ZERO=zero.way, PAGED=not codes.of_layer, PAGE=page_tokens, HEADS=kv_heads,
        GROUPS=codes.groups, WIDTH=width, TOKENS=tokens, num_warps=4,
    )  # fmt: skip
