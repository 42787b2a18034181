"""One tile of a cache of 16-bit words of codes, for the loop in `decode_words.py`, in two ways.

`narrow_step`: few query rows in sets of 8 as columns or of 16 as rows (`query_sets.py`).
`wide_step`: many query rows as columns, a tile dequantised once for up to 64 of them, in sets as wide as powers of two
allow. On Hopper four warps multiply together there where words and tokens are 64 or more: the dequantised tile comes
from registers, queries and weights from shared memory. It rescales outputs only where scores pass what weights are
relative to by more than a few powers of two: an exact choice, since all that a row has summed is relative to one
number.
"""

from realkernels.jit import stable_keys, tl, triton
from realkernels.kernels.arithmetic import exp2, halves, log2, packed
from realkernels.kernels.query_sets import (
    by_rows,
    largest_scores,
    per_row,
    per_token,
    product,
    softmax_set,
    token_sums,
)

LEAST_SCALE: tl.constexpr = tl.constexpr(2.0**-24)
SLACK: tl.constexpr = tl.constexpr(8.0)
"""Scores (base 2) may pass what weights are relative to by this much before everything is rescaled."""


@triton.constexpr_function
def token_scales(zero):
    """Whether scales are of tokens, not of groups of 32 elements."""
    return zero in ("code", "value")


@triton.jit
def _spread(scale, TOKENS_LAST: tl.constexpr, PER_WORD: tl.constexpr):
    """Scales [TILE, GROUPS] or [GROUPS, TILE] for every word of their group."""
    if TOKENS_LAST:
        each = tl.broadcast_to(scale[:, None, :], [scale.shape[0], 32 // PER_WORD, scale.shape[1]])
        words = each.reshape(scale.shape[0] * (32 // PER_WORD), scale.shape[1])
    else:
        each = tl.broadcast_to(scale[:, :, None], [scale.shape[0], scale.shape[1], 32 // PER_WORD])
        words = each.reshape(scale.shape[0], scale.shape[1] * (32 // PER_WORD))
    return words


@triton.jit
def _fifth_bits(high, TOKENS_LAST: tl.constexpr, PER_WORD: tl.constexpr):
    """int16, the fifth bits of GGML's words in their low four: of elements 2w, 2w + 1, 2w + 16, 2w + 17 of a group."""
    words = _spread(high, TOKENS_LAST, PER_WORD)
    COUNT: tl.constexpr = words.shape[0] if TOKENS_LAST else words.shape[1]
    words = words >> tl.expand_dims(tl.arange(0, COUNT) % 8 * 2, 1 if TOKENS_LAST else 0)
    return (words & 3 | words >> 14 & 12).to(tl.int16)


@triton.jit
def _tile_scales(
    k_scale, v_scale, v_zero, factor, ZEROS: tl.constexpr, KW: tl.constexpr, VW: tl.constexpr, ZERO: tl.constexpr,
    PAIRS: tl.constexpr, AXIS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Scales of words of K and V; for scores factor, shift by the query's sum; log2, inverse of V's scale; V's zero."""
    if ZERO == "":
        vx = _spread(v_scale, AXIS == 0, VW)
        if AXIS == 0:
            vx = packed(vx, ASM)
        scales = (_spread(k_scale, False, KW), vx, factor, factor, factor, factor, factor)
    elif ZERO == "min":
        kx = (_spread(k_scale[0], False, KW), _spread(k_scale[1], False, KW), _fifth_bits(k_scale[2], False, KW))
        vx = (_spread(v_scale[0], True, VW), _spread(v_scale[1], True, VW), _fifth_bits(v_scale[2], True, VW))
        vx = (packed(vx[0], ASM), packed(vx[1], ASM), vx[2])
        scales = (kx, vx, factor, factor, factor, factor, factor)
    else:
        lane = tl.arange(0, k_scale.shape[0])
        v_scale, v_zero = halves(v_scale, lane, PAIRS), halves(v_zero, lane, PAIRS)
        least = tl.where(v_scale < LEAST_SCALE, LEAST_SCALE, v_scale)  # equal values have the scale 0
        v_log = log2(least, ASM)
        k_scale = halves(k_scale, lane, PAIRS)
        k_factor = k_scale * factor
        k_zero, v_zero = ZEROS(k_scale, v_scale, least, v_zero)
        scales = (
            k_scale, v_scale, per_token(k_factor, AXIS), per_token(k_factor * k_zero, AXIS), per_token(v_log, AXIS),
            per_token(exp2(-v_log, ASM), AXIS), per_token(v_zero, AXIS),
        )  # fmt: skip
    return scales


@triton.jit
def _scores(kw, kx, constants, KEY: tl.constexpr, AXIS: tl.constexpr, ASM: tl.constexpr):
    """Products of a tile's numbers with each set's query parts."""
    scores = ()
    for i in tl.static_range(len(constants)):
        scores += (by_rows(kw.shape[AXIS], constants[i][1].shape[0], AXIS),)
    for number in tl.static_range(len(constants[0][0])):
        k = KEY(kw, kx, number, ASM)
        added = ()
        for i in tl.static_range(len(constants)):
            added += (product(k, constants[i][0][number], scores[i], AXIS),)
        scores = added
    return scores


@triton.jit
def _outputs(vw, vx, weights, outputs, decays, VALUE: tl.constexpr, AXIS: tl.constexpr, ASM: tl.constexpr):
    """Outputs with a tile's weighted numbers added, after a factor a set (none where `decays` is empty)."""
    after = ()
    for number in tl.static_range(len(outputs)):
        v = VALUE(vw, vx, number, ASM)
        added = ()
        for i in tl.static_range(len(weights)):
            o = outputs[number][i]
            if len(decays) > 0:
                o *= decays[i]
            added += (product(v, weights[i], o, AXIS),)
        after += (added,)
    return after


@triton.jit
def narrow_step(  # noqa: C901
    kw, vw, k_scale, v_scale, v_zero, token, constants, state, outputs, factor, _fresh,
    KEY: tl.constexpr, VALUE: tl.constexpr, ZEROS: tl.constexpr, KW: tl.constexpr, VW: tl.constexpr,
    ZERO: tl.constexpr, PAIRS: tl.constexpr, MASKED: tl.constexpr, AXIS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """One tile for all sets of rows: words kw [TILE, WORDS], vw alike (AXIS 1) or [WORDS, TILE]; token numbers [TILE].

    Scales [TILE] or [TILE, GROUPS], those of V as its words are. constants: a set's query parts, sum and first unseen
    token; state: its maximum, mass and zeros' share; outputs: one a code and set. Returns both, new.
    """
    SETS: tl.constexpr = len(constants)
    kx, vx, k_factor, shift, v_log, v_inverse, v_zero = _tile_scales(
        k_scale, v_scale, v_zero, factor, ZEROS, KW, VW, ZERO, PAIRS, AXIS, ASM
    )
    if AXIS == 1:
        kw = tl.trans(kw)
        if ZERO == "":  # no other groups are read so
            kx = tl.trans(kx)
    scores = _scores(kw, kx, constants, KEY, AXIS, ASM)
    logits = ()
    for i in tl.static_range(SETS):
        s = scores[i] * k_factor
        if ZERO == "code":
            s += v_log - per_row(constants[i][1], AXIS) * shift
        elif ZERO == "value":
            s += v_log
        if MASKED:
            s = tl.where(per_token(token, AXIS) < per_row(constants[i][2], AXIS), s, float("-inf"))
        logits += (s,)
    tops = largest_scores(logits, AXIS)
    weights = ()
    decays = ()
    after = ()
    for i in tl.static_range(SETS):
        top, mass, low = state[i]
        visible = None
        if MASKED:
            visible = per_token(token, AXIS) < per_row(constants[i][2], AXIS)
        p, decay, top = softmax_set(logits[i], top, tops[i], AXIS, ASM)
        decay = per_row(decay, AXIS)
        weight = p
        if token_scales(ZERO):
            weight = p * v_inverse
            if MASKED:
                weight = tl.where(visible, weight, 0.0)  # the scale of a token that nobody sees may be NaN
        mass = mass * decay + token_sums(weight, mass.shape[AXIS], AXIS)
        p = p.to(tl.float16)
        if token_scales(ZERO):
            share = (p.to(tl.float32) if ZERO == "code" else weight) * v_zero
            if MASKED and ZERO == "value":
                share = tl.where(visible, share, 0.0)
            low = low * decay + token_sums(share, low.shape[AXIS], AXIS)
        weights += (p,)
        decays += (decay,)
        after += ((top, mass, low),)
    return after, _outputs(vw, vx, weights, outputs, decays, VALUE, AXIS, ASM)


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
def wide_step(
    kw, vw, k_scale, v_scale, v_zero, token, constants, state, outputs, factor, fresh,
    KEY: tl.constexpr, VALUE: tl.constexpr, ZEROS: tl.constexpr, KW: tl.constexpr, VW: tl.constexpr,
    ZERO: tl.constexpr, PAIRS: tl.constexpr, MASKED: tl.constexpr, AXIS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """As `narrow_step` (AXIS 0), but state has a base, what weights are relative to, in place of the maximum.

    fresh: the thread block's first tile.
    """
    TILE: tl.constexpr = kw.shape[0]
    SETS: tl.constexpr = len(constants)
    kx, vx, k_factor, shift, v_log, v_inverse, v_zero = _tile_scales(
        k_scale, v_scale, v_zero, factor, ZEROS, KW, VW, ZERO, PAIRS, AXIS, ASM
    )
    scores = _scores(kw, kx, constants, KEY, AXIS, ASM)
    over = ()
    highest = tl.full([TILE], float("-inf"), tl.float32)
    for i in tl.static_range(SETS):
        s = scores[i] * k_factor
        if token_scales(ZERO):
            s += v_log
        if ZERO == "code":
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
        if token_scales(ZERO):
            weight = weight * v_inverse
            share = (p.to(tl.float32) if ZERO == "code" else weight) * v_zero
            if MASKED:  # the scale of a token that a row does not see may be NaN
                visible = token[:, None] < constants[i][2][None, :]
                weight, share = tl.where(visible, weight, 0.0), tl.where(visible, share, 0.0)
            low += _in_thread(share, low.shape[0])
        after += ((base, mass + _in_thread(weight, mass.shape[0]), low),)
        weights += (p,)
    return after, _outputs(vw, vx, weights, outputs, (), VALUE, AXIS, ASM)


stable_keys(globals())
