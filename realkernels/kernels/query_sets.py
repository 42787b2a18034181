"""Query rows of a KV head in sets, on either side of the products, and running softmax over them.

The matrix units take 16 rows by 8 columns. AXIS 0: tokens and elements are the rows and a set of queries the columns,
scores [TILE, N] and outputs [WORDS, N]: with the few query rows of one token (6 at 24 heads over 4) half the products
and half the scores of the other way round. AXIS 1: a set of queries is the rows, scores [N, TILE] and outputs [N,
WORDS]: more warps share a tile without doing anything twice. AXIS is that of the tokens in scores.

A thread block has ROWS query rows in sets of powers of two, at most SET of them: 48 rows are 32 and 16, or three of 16.
"""

from realkernels.jit import tl, triton
from realkernels.kernels.arithmetic import exp2
from realkernels.kernels.split_kv import store_part


@triton.constexpr_function
def set_widths(rows, most):
    """Query rows of each set, the widest first: powers of two up to `most`, which is one."""
    widths = []
    while rows:
        widths.append(min(most, 1 << rows.bit_length() - 1))
        rows -= widths[-1]
    return widths


@triton.constexpr_function
def set_count(rows, most):
    """Sets that `rows` query rows make."""
    return len(set_widths(rows, most))


@triton.constexpr_function
def set_width(rows, most, index):
    """Query rows of set `index`."""
    return set_widths(rows, most)[index]


@triton.constexpr_function
def set_first(rows, most, index):
    """First query row of set `index` within its thread block's."""
    return sum(set_widths(rows, most)[:index])


@triton.jit
def set_rows(block, index: tl.constexpr, ROWS: tl.constexpr, SET: tl.constexpr):
    """Numbers of a set's query rows within Q_TOKENS x GROUP; some may lie beyond."""
    return block * ROWS + set_first(ROWS, SET, index) + tl.arange(0, set_width(ROWS, SET, index))


@triton.jit
def per_token(x, AXIS: tl.constexpr):
    """[TILE] for scores."""
    return tl.expand_dims(x, 1 - AXIS)


@triton.jit
def per_row(x, AXIS: tl.constexpr):
    """[N] for scores and outputs."""
    return tl.expand_dims(x, AXIS)


@triton.jit
def by_rows(count: tl.constexpr, N: tl.constexpr, AXIS: tl.constexpr):
    """fp32 zeros: scores or outputs of `count` tokens or elements, for N query rows."""
    return tl.zeros([count, N], tl.float32) if AXIS == 0 else tl.zeros([N, count], tl.float32)


@triton.jit
def product(numbers, x, sums, AXIS: tl.constexpr):
    """Numbers [M, K] x [K, N] + sums, or x [N, K] times numbers [K, M] + sums."""
    return tl.dot(numbers, x, sums) if AXIS == 0 else tl.dot(x, numbers, sums)


@triton.jit
def query_part(
    query, element, rows, batch, kv_head, q_batch, q_token, q_head,
    Q_TOKENS: tl.constexpr, GROUP: tl.constexpr, AXIS: tl.constexpr,
):  # fmt: skip
    """fp32 [ELEMENTS, N] or [N, ELEMENTS]: these elements of the rows of a set, zeros where rows lie beyond."""
    at = batch * q_batch + rows // GROUP * q_token + (kv_head * GROUP + rows % GROUP) * q_head
    live = tl.expand_dims(rows < Q_TOKENS * GROUP, AXIS)
    at = query + tl.expand_dims(at, AXIS) + tl.expand_dims(element, 1 - AXIS)
    return tl.load(at, mask=live, other=0.0).to(tl.float32)


@triton.jit
def largest_scores(scores, AXIS: tl.constexpr):
    """The largest score of each row, [N] a set; of four sets at once, since warps wait for each other there."""
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
def store_set(
    partial, statistics, o, top, mass, batch, split, kv_head, rows, element,
    Q_TOKENS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, splits, DIM: tl.constexpr, AXIS: tl.constexpr,
):  # fmt: skip
    """`store_part` of o [ELEMENTS, N] or [N, ELEMENTS]."""
    if AXIS == 0:
        o = tl.trans(o)
    store_part(
        partial, statistics, o, top, mass, batch, split, kv_head, rows, element, Q_TOKENS, HEADS, GROUP, splits, DIM
    )
