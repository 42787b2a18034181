"""Combining the attention over one kv chunk of a context with that over the chunks before it, by log-sum-exp.

With o and l of the tokens so far (l the logarithm of the sum of exponentials) and o', l' of a chunk, both together have
L = log(e^l + e^l') and O = o e^(l - L) + o' e^(l' - L).
"""

from math import log

import torch

from realkernels.jit import tl, triton

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
ELEMENTS = 4096
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
    _check(part, lse, total, weight, out)
    each = max(1, ELEMENTS // dim)
    _combine[(triton.cdiv(rows * heads, each),)](
        part, lse, total, weight, out, rows * heads, lse.stride(0),
        HEADS=heads, DIM=dim, ROWS=each, FIRST=first, LAST=last, num_warps=4,
    )  # fmt: skip


def _check(part: torch.Tensor, lse: torch.Tensor, total: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """ValueError for sizes that do not belong together, and for rows that are not dense."""
    rows, heads, dim = part.shape
    right = tuple(lse.shape) == (heads, rows) and tuple(weight.shape) == (rows, heads)
    if not right or any(tuple(each.shape) != (rows, heads, dim) for each in (total, out)) or dim & (dim - 1):
        raise ValueError(
            f"part {tuple(part.shape)}, lse {tuple(lse.shape)}, total {tuple(total.shape)}, weight "
            f"{tuple(weight.shape)} and out {tuple(out.shape)} do not belong together"
        )
    if not all(each.is_contiguous() for each in (part, total, weight, out)) or lse.stride(1) != 1:
        raise ValueError("part, total, weight and out must be dense, rows of lse one behind the other")


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
