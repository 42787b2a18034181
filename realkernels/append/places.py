"""Where a program's tokens come from and go to: rows of K and V, slots of paged planes.

A part of a cache is a tuple (view, stride of a page, of a head, of a token), strides in elements of the view.
"""

import torch
import triton
import triton.language as tl

Part = tuple[torch.Tensor, int, int, int]


def part(view: torch.Tensor) -> Part:
    """A view [page, head, token, ...] as kernels take it."""
    page, head, token = view.stride()[:3]
    return view, page, head, token


def rows(x: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """K or V [tokens, heads, elements] as kernels take it: with the strides of a token and of a head."""
    return x, x.stride(0), x.stride(1)


@triton.jit
def page_and_offset(slots, tokens, there, PAGE: tl.constexpr):
    """Page (int64) and offset (int32) of the tokens `there`; slots int64 below 2^31."""
    slot = tl.load(slots + tokens, mask=there, other=0).to(tl.int32)
    return (slot // PAGE).to(tl.int64), slot % PAGE


@triton.jit
def place(part, page, head, offset):
    """Pointers to a token's elements of a part."""
    return part[0] + page * part[1] + head * part[2] + offset * part[3]


@triton.jit
def load_rows(x, tokens, head, keep, WIDTH: tl.constexpr):
    """float32 [tokens, WIDTH] of one head of x (see `rows`), 0 where not `keep`."""
    at = x[0] + tokens.to(tl.int64)[:, None] * x[1] + head * x[2] + tl.arange(0, WIDTH)[None, :]
    return tl.load(at, mask=keep, other=0.0).to(tl.float32)
