"""Merging the splits of a decode attention: rescale each running softmax to the largest maximum, add, divide."""

import torch
import triton
import triton.language as tl

from realkernels.attend.splits import Workspace


@triton.jit(do_not_specialize=["splits"])
def _merge(
    partial, statistics, out, out_batch, out_token, out_head, splits,
    Q_TOKENS: tl.constexpr, HEADS: tl.constexpr, STEP: tl.constexpr, DIM: tl.constexpr,
    PIECE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    dims = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    step = tl.arange(0, STEP)
    top = tl.full([STEP], float("-inf"), tl.float32)
    for first in range(0, splits, STEP):
        split = first + step
        part = tl.load(statistics + (row * splits + split) * 2, mask=split < splits, other=float("-inf"))
        top = tl.maximum(top, part)
    best = tl.max(top, axis=0)
    base = tl.where(best == float("-inf"), 0.0, best)
    mass = tl.zeros([STEP], tl.float32)
    sums = tl.zeros([STEP, PIECE], tl.float32)
    for first in range(0, splits, STEP):
        split = first + step
        at = row * splits + split
        part = tl.load(statistics + at * 2, mask=split < splits, other=float("-inf"))
        seen = part != float("-inf")  # NaN counts as seen
        o = tl.load(partial + at.to(tl.int64)[:, None] * DIM + dims[None, :], mask=seen[:, None], other=0.0)
        weight = tl.where(seen, tl.exp2(part - base), 0.0)
        mass += weight * tl.load(statistics + at * 2 + 1, mask=seen, other=0.0)
        sums += weight[:, None] * o
    total = tl.sum(mass, axis=0)
    merged = tl.sum(sums, axis=0) / tl.where(best == float("-inf"), 1.0, total)  # nothing seen: zeros
    batch = row // (Q_TOKENS * HEADS)
    at = batch.to(tl.int64) * out_batch + row // HEADS % Q_TOKENS * out_token + row % HEADS * out_head
    tl.store(out + at + dims, merged.to(out.dtype.element_ty))


def merge(workspace: Workspace, out: torch.Tensor, *, piece: int = 64, num_warps: int = 4) -> torch.Tensor:
    """Attention from the parts in `workspace`, into `out` [batch, q_tokens, query_heads, head_dim] (last stride 1).

    A query that no split has seen a token of gets zeros. One launch, capturable in a CUDA graph.
    """
    batch, q_tokens, heads, dim = out.shape
    workspace.check(out)
    if out.stride(3) != 1:
        raise ValueError(f"the elements of an output row must be neighbours, stride is {out.stride(3)}")
    splits = workspace.splits
    piece = min(piece, dim)
    _merge[(batch * q_tokens * heads, dim // piece)](
        workspace.partial, workspace.statistics, out, out.stride(0), out.stride(1), out.stride(2), splits,
        Q_TOKENS=q_tokens, HEADS=heads, STEP=min(triton.next_power_of_2(splits), 64), DIM=dim,
        PIECE=piece, num_warps=num_warps,
    )  # fmt: skip
    return out
