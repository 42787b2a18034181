"""Decode attention with sets of query rows on either side of the products.

The matrix units take 16 rows by 8 columns. AXIS 0: tokens and elements are the rows and a set of 8 queries the columns,
scores [TILE, 8] and outputs [WORDS, 8]: with the few query rows of one token (6 at 24 heads over 4) half the products
and half the scores of the other way round. AXIS 1: a set of 16 queries is the rows, scores [16, TILE] and outputs [16,
WORDS]: more warps share a tile without doing anything twice. AXIS is that of the tokens in scores.
"""

import triton
import triton.language as tl

from realkernels.attend.splits import store_part
from realkernels.attend.tiles import exp2


@triton.jit
def set_rows(block, index: tl.constexpr, SETS: tl.constexpr, AXIS: tl.constexpr):
    """Numbers of the 8 or 16 query rows of a set within Q_TOKENS x GROUP; some may lie beyond."""
    return (block * SETS + index) * (8 + 8 * AXIS) + tl.arange(0, 8 + 8 * AXIS)


@triton.jit
def per_token(x, AXIS: tl.constexpr):
    """[TILE] for scores."""
    return tl.expand_dims(x, 1 - AXIS)


@triton.jit
def per_row(x, AXIS: tl.constexpr):
    """[8] or [16] for scores and outputs."""
    return tl.expand_dims(x, AXIS)


@triton.jit
def by_rows(count: tl.constexpr, AXIS: tl.constexpr):
    """fp32 zeros: scores or outputs of `count` tokens or elements."""
    return tl.zeros([count, 8], tl.float32) if AXIS == 0 else tl.zeros([16, count], tl.float32)


@triton.jit
def product(numbers, x, sums, AXIS: tl.constexpr):
    """Numbers [N, K] x [K, 8] + sums, or x [16, K] times numbers [K, N] + sums."""
    return tl.dot(numbers, x, sums) if AXIS == 0 else tl.dot(x, numbers, sums)


@triton.jit
def query_part(
    query, element, rows, batch, kv_head, q_batch, q_token, q_head,
    Q_TOKENS: tl.constexpr, GROUP: tl.constexpr, AXIS: tl.constexpr,
):  # fmt: skip
    """fp32 [ELEMENTS, 8] or [16, ELEMENTS]: these elements of the rows of a set, zeros where rows lie beyond."""
    at = batch * q_batch + rows // GROUP * q_token + (kv_head * GROUP + rows % GROUP) * q_head
    live = tl.expand_dims(rows < Q_TOKENS * GROUP, AXIS)
    at = tl.expand_dims(at, AXIS) + tl.expand_dims(element, 1 - AXIS)
    return tl.load(query + at, mask=live, other=0.0).to(tl.float32)


@triton.jit
def largest(x):
    """Largest magnitude of a matrix, a scalar."""
    return tl.max(tl.max(tl.abs(x), axis=1), axis=0)


@triton.jit
def power_below(number):
    """A power of two p for an fp32 number >= 0: number / p is in [1, 2); 1 for tiny numbers and zero."""
    bits = (number.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(number < 1e-30, 1.0, bits)


@triton.jit
def largest_scores(scores, AXIS: tl.constexpr):
    """The largest score of each row, [8] or [16] a set; of four sets at once, since warps wait for each other there."""
    SETS: tl.constexpr = len(scores)
    if SETS == 1:
        tops = (tl.max(scores[0], axis=AXIS),)
    elif SETS == 2:
        a, b = tl.split(tl.max(tl.join(scores[0], scores[1]), axis=AXIS))
        tops = (a, b)
    elif SETS <= 4:  # of three sets the third twice
        joined = tl.join(tl.join(scores[0], scores[1]), tl.join(scores[2], scores[SETS - 1]))
        ab, cd = tl.split(tl.max(joined, axis=AXIS))
        a, b = tl.split(ab)
        c, d = tl.split(cd)
        tops = (a, b, c) if SETS == 3 else (a, b, c, d)
    else:
        rest = ()
        for i in tl.static_range(4, SETS):
            rest += (scores[i],)
        tops = largest_scores((scores[0], scores[1], scores[2], scores[3]), AXIS) + largest_scores(rest, AXIS)
    return tops


@triton.jit
def softmax_set(s, top, new, AXIS: tl.constexpr, ASM: tl.constexpr):
    """One tile of running softmax for a set: scores s in base 2, -inf for what a row does not see, and their largest.

    top and new hold a number a row. Returns p = 2^(s - new top), the factor for everything accumulated so far, the new
    top.
    """
    new = tl.maximum(top, new)
    base = tl.where(new == float("-inf"), 0.0, new)
    return exp2(s - per_row(base, AXIS), ASM), exp2(top - base, ASM), new


@triton.jit
def token_sums(x, KEEP: tl.constexpr, AXIS: tl.constexpr):
    """Scores summed to KEEP tokens, tokens t with the same t % KEEP: within threads for the right KEEP."""
    TILE: tl.constexpr = x.shape[AXIS]
    if TILE == KEEP:
        sums = x
    elif AXIS == 0:
        sums = tl.sum(x.reshape(TILE // KEEP, KEEP, x.shape[1]), axis=0)
    else:
        sums = tl.sum(x.reshape(x.shape[0], TILE // KEEP, KEEP), axis=1)
    return sums


@triton.jit
def halves(x, index, PAIRS: tl.constexpr):
    """FP32 of fp16 x, or of PAIRS: int32 x[n] holds two neighbours, number index[n] of a row at one half or the other.

    Asynchronous loads take 4 bytes or more, so that each thread loads a pair for the sake of one of it.
    """
    if PAIRS:
        x = (x >> (index % 2 * 16)).to(tl.int16).to(tl.float16, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def read_page(table, at, ASM: tl.constexpr):
    """Page number `at` of a table, int64; as assembly, so that it takes no stage of Triton's pipelining."""
    if ASM:
        page = tl.inline_asm_elementwise(
            "ld.global.nc.b32 $0, [$1];", "=r,l", [(table + at).to(tl.int64)], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        page = tl.load(table + at)
    return page.to(tl.int64)


@triton.jit
def store_set(
    partial, statistics, o, top, mass, batch, split, kv_head, rows, element,
    Q_TOKENS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, splits, DIM: tl.constexpr, AXIS: tl.constexpr,
):  # fmt: skip
    """`store_part` of o [ELEMENTS, 8] or [16, ELEMENTS]."""
    if AXIS == 0:
        o = tl.trans(o)
    store_part(
        partial, statistics, o, top, mass, batch, split, kv_head, rows, element, Q_TOKENS, HEADS, GROUP, splits, DIM
    )
