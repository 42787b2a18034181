"""Combining the splits of a decode attention: rescale each running softmax to the largest maximum, add, divide.

Partial results of words of codes lie as the kernels have them, all first codes of the words, then all second ones:
neighbours are stored together, and put in their places here, where they are few.
"""

import torch

from realkernels.jit import tl, triton
from realkernels.kernels.split_kv import Workspace

MANY_ROWS = 1024
"""From so many on a thread block combines a whole row: several per row would wait for one another on a device."""

FEW_ROWS_BLOCK = 64


@triton.jit
def element(word, number, PER_WORD: tl.constexpr, GGML: tl.constexpr):
    """Element of the head that code `number` of words (int32) stands for; GGML has elements 16 apart in one byte."""
    return word // 8 * 32 + word % 8 * 2 + number // 2 + number % 2 * 16 if GGML else word * PER_WORD + number


@triton.jit(do_not_specialize=["splits", "q_tokens", "heads"])
def _combine_splits(
    partial, statistics, out, out_batch, out_token, out_head, splits, q_tokens, heads,
    STEP: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, PER_WORD: tl.constexpr, GGML: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    dims = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    step = tl.arange(0, STEP)
    top = tl.full([STEP], float("-inf"), tl.float32)
    for first in range(0, splits, STEP):
        split = first + step
        part = tl.load(statistics + (row * splits + split) * 2, mask=split < splits, other=float("-inf"))
        top = tl.maximum(top, part)
    best = tl.max(top, axis=0)
    base = tl.where(best == float("-inf"), 0.0, best)
    mass = tl.zeros([STEP], tl.float32)
    sums = tl.zeros([STEP, BLOCK], tl.float32)
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
    combined = tl.sum(sums, axis=0) / tl.where(best == float("-inf"), 1.0, total)  # nothing seen: zeros
    batch = row // (q_tokens * heads)
    at = batch.to(tl.int64) * out_batch + row // heads % q_tokens * out_token + row % heads * out_head
    WORDS: tl.constexpr = DIM // PER_WORD
    tl.store(out + at + element(dims % WORDS, dims // WORDS, PER_WORD, GGML), combined.to(out.dtype.element_ty))


def combine_splits(
    workspace: Workspace, out: torch.Tensor, *, per_word: int = 1, ggml: bool = False, block: int | None = None,
    num_warps: int = 4,
) -> torch.Tensor:  # fmt: skip
    """Attention from the parts in `workspace`, into `out` [batch, q_tokens, query_heads, head_dim] (last stride 1).

    A query that no split has seen a token of gets zeros. With `per_word` codes a word the parts lie code by code,
    `ggml` in that order of elements. `block`: elements of a thread block, by default few where there are few rows. One
    launch, capturable in a CUDA graph.
    """
    batch, q_tokens, heads, dim = out.shape
    workspace.check(out)
    if out.stride(3) != 1:
        raise ValueError(f"the elements of an output row must be neighbours, stride is {out.stride(3)}")
    splits = workspace.splits
    if block is None:
        block = dim if batch * q_tokens * heads >= MANY_ROWS else FEW_ROWS_BLOCK
    block = min(block, dim)
    _combine_splits[(batch * q_tokens * heads, dim // block)](
        workspace.partial, workspace.statistics, out, out.stride(0), out.stride(1), out.stride(2), splits, q_tokens,
        heads, STEP=min(triton.next_power_of_2(splits), 64), DIM=dim, BLOCK=block, PER_WORD=per_word, GGML=ggml,
        num_warps=num_warps,
    )  # fmt: skip
    return out
