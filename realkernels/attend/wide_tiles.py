"""One tile of a cache of 16-bit words for many query rows at once, for the kernel in `decode_words_wide.py`.

Tokens and elements are the rows of all products and queries the columns, in sets as wide as powers of two allow: 40
rows are 32 and 8 columns. On Hopper four warps multiply together where words and tokens are 64 or more: the decoded
tile comes from registers, queries and weights from shared memory, and a decoded number serves all rows.
"""

import triton
import triton.language as tl

from realkernels.attend.tiles import exp2
from realkernels.attend.word_tiles import GROUPS, INT4, key_number, tile_scales, value_number
from realkernels.settled import settle

SLACK: tl.constexpr = tl.constexpr(8.0)
"""Scores (base 2) may pass what weights are relative to by this much before everything is rescaled."""


@triton.constexpr_function
def set_width(rows, index):
    """Columns of a set of `rows` query rows, the widest set first; 0 beyond the last."""
    for _ in range(index):
        rows -= 1 << rows.bit_length() - 1
    return 1 << rows.bit_length() - 1 if rows else 0


@triton.constexpr_function
def set_count(rows):
    """Sets that `rows` query rows are cut into: one a power of two."""
    count = 0
    while rows:
        rows -= 1 << rows.bit_length() - 1
        count += 1
    return count


@triton.constexpr_function
def set_first(rows, index):
    """First row of a set within its program's."""
    left = rows
    for _ in range(index):
        left -= 1 << left.bit_length() - 1
    return rows - left


@triton.jit
def _in_thread(x, WARPS: tl.constexpr):
    """[TILE, N] summed over rows that one thread holds: [WARPS, 8, N]."""
    x = x.reshape(x.shape[0] // (16 * WARPS), WARPS, 2, 8, x.shape[1])
    return tl.sum(tl.sum(x, axis=2), axis=0)


@triton.jit
def _raised(over, state, outputs, fresh, ASM: tl.constexpr):
    """Scores over their bases, state and outputs for bases at each row's largest score; `fresh`: nothing is summed."""
    less = ()
    after = ()
    decays = ()
    for i in tl.static_range(len(over)):
        base, mass, low = state[i]
        up = tl.max(over[i], axis=0)
        up = tl.where(up == float("-inf"), 0.0, tl.where(fresh, up, tl.maximum(up, 0.0)))
        decay = tl.where(fresh, 0.0, exp2(-up, ASM))
        less += (over[i] - up[None, :],)
        after += ((base + up, mass * decay[None, None, :], low * decay[None, None, :]),)
        decays += (decay,)
    moved = ()
    for number in tl.static_range(len(outputs)):
        part = ()
        for i in tl.static_range(len(over)):
            part += (outputs[number][i] * decays[i][None, :],)
        moved += (part,)
    return less, after, moved


@triton.jit
def wide_step(  # noqa: C901, PLR0912
    kw, vw, k_scale, v_scale, v_zero, token, constants, state, outputs, factor, fresh,
    FORMAT: tl.constexpr, KW: tl.constexpr, KZ: tl.constexpr, KF: tl.constexpr, VW: tl.constexpr, VZ: tl.constexpr,
    VF: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr, MASKED: tl.constexpr, WARPS: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """One tile for all sets of rows: words kw [TILE, WORDS] and vw [WORDS, TILE], token numbers [TILE].

    Scales [TILE] or [TILE, GROUPS], those of V as its words are. constants: a set's query parts, sum and first unseen
    token; state: its base, what weights are relative to, mass and zeros' share; outputs: one a code and set; fresh: the
    program's first tile. Returns both, new.
    """
    SETS: tl.constexpr = set_count(ROWS)
    TILE: tl.constexpr = kw.shape[0]
    kx, vx, k_factor, shift, v_log, v_inverse, v_zero = tile_scales(
        k_scale, v_scale, v_zero, tl.arange(0, TILE), factor, FORMAT, KW, VW, PAIRS, 0, ASM
    )
    scores = ()
    for i in tl.static_range(SETS):
        scores += (tl.zeros([TILE, set_width(ROWS, i)], tl.float32),)
    for number in tl.static_range(KW):
        k = key_number(kw, kx, number, FORMAT, KW, KZ, KF, ASM)
        added = ()
        for i in tl.static_range(SETS):
            added += (tl.dot(k, constants[i][0][number], scores[i]),)
        scores = added
    over = ()
    highest = tl.full([TILE], float("-inf"), tl.float32)
    for i in tl.static_range(SETS):
        s = scores[i] * k_factor
        if FORMAT != GROUPS:
            s += v_log
        if FORMAT == INT4:
            s -= constants[i][1][None, :] * shift
        if MASKED:
            s = tl.where(token[:, None] < constants[i][2][None, :], s, float("-inf"))
        s -= state[i][0][None, :]
        highest = tl.maximum(highest, tl.max(s, axis=1))
        over += (s,)
    if (tl.max(highest, axis=0) > SLACK) | fresh:
        over, state, outputs = _raised(over, state, outputs, fresh, ASM)
    weights = ()
    after = ()
    for i in tl.static_range(SETS):
        base, mass, low = state[i]
        p = exp2(over[i], ASM)
        weight, p = p, p.to(tl.float16)
        if FORMAT != GROUPS:
            weight = weight * v_inverse
            share = (p.to(tl.float32) if FORMAT == INT4 else weight) * v_zero
            if MASKED:  # the scale of a token that a row does not see may be NaN
                visible = token[:, None] < constants[i][2][None, :]
                weight, share = tl.where(visible, weight, 0.0), tl.where(visible, share, 0.0)
            low += _in_thread(share, WARPS)
        after += ((base, mass + _in_thread(weight, WARPS), low),)
        weights += (p,)
    new_outputs = ()
    for number in tl.static_range(VW):
        v = value_number(vw, vx, number, FORMAT, VW, VZ, VF, ASM)
        added = ()
        for i in tl.static_range(SETS):
            added += (tl.dot(v, weights[i], outputs[number][i]),)
        new_outputs += (added,)
    return after, new_outputs


settle(globals())
