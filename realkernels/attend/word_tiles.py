"""One tile of a cache whose rows are 16-bit words of two or four codes, for the kernel in `decode_words.py`."""

import triton
import triton.language as tl

from realkernels.attend.columns import (
    by_rows,
    halves,
    largest_scores,
    per_row,
    per_token,
    product,
    softmax_set,
    token_sums,
)
from realkernels.attend.nibbles import centred_code, odd_polynomial, packed, scaled_code, tiny_code
from realkernels.attend.tiles import exp2, log2
from realkernels.settled import settle

INT4: tl.constexpr = tl.constexpr(0)
GROUPS: tl.constexpr = tl.constexpr(1)
TURBOQUANT: tl.constexpr = tl.constexpr(2)
CENTRE: tl.constexpr = tl.constexpr(7.5)
"""Taken off every code of V before its product."""
LEAST_SCALE: tl.constexpr = tl.constexpr(2.0**-24)
QUERY_TOP: tl.constexpr = tl.constexpr(512.0)
"""Queries are brought to fp16 with their largest magnitude in [512, 1024)."""


@triton.jit
def element(word, number, PER_WORD: tl.constexpr, GGML: tl.constexpr):
    """Element of the head that code `number` of words (int32) stands for; GGML has elements 16 apart in one byte."""
    return word // 8 * 32 + word % 8 * 2 + number // 2 + number % 2 * 16 if GGML else word * PER_WORD + number


@triton.jit
def zero_point(scale):
    """The low four bits of fp32 scales, as fp32."""
    return (scale.to(tl.int32, bitcast=True) & 15).to(tl.float32)


@triton.constexpr_function
def query_unit(number, form):
    """What a query part is multiplied by since its codes are read with different powers of two."""
    return 16.0 ** -(number % 2) if form == 0 else 1.0  # INT4


@triton.jit
def key_number(
    w, scale, number: tl.constexpr, FORMAT: tl.constexpr, KW: tl.constexpr, KZ: tl.constexpr, KF: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Code `number` of words of K as the products take it, fp16; a format's scale per token comes after."""
    if FORMAT == GROUPS:
        x = scaled_code(w, scale, number, KW, KZ, KF, ASM)
    elif FORMAT == TURBOQUANT:
        x = odd_polynomial(w, number, 0.050140380859375, 0.045318603515625, ASM)
    else:
        x = tiny_code(w, number, 4, ASM)
    return x


@triton.jit
def value_number(
    w, scale, number: tl.constexpr, FORMAT: tl.constexpr, VW: tl.constexpr, VZ: tl.constexpr, VF: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Likewise of V: less CENTRE where a zero point per token comes after."""
    return scaled_code(w, scale, number, VW, VZ, VF, ASM) if FORMAT == GROUPS else centred_code(w, number, ASM)


@triton.jit
def spread_scales(scale, TOKENS_LAST: tl.constexpr, PER_WORD: tl.constexpr):
    """Scales [TILE, GROUPS] or [GROUPS, TILE] for every word of their group."""
    if TOKENS_LAST:
        each = tl.broadcast_to(scale[:, None, :], [scale.shape[0], 32 // PER_WORD, scale.shape[1]])
        words = each.reshape(scale.shape[0] * (32 // PER_WORD), scale.shape[1])
    else:
        each = tl.broadcast_to(scale[:, :, None], [scale.shape[0], scale.shape[1], 32 // PER_WORD])
        words = each.reshape(scale.shape[0], scale.shape[1] * (32 // PER_WORD))
    return words


@triton.jit
def tile_scales(
    k_scale, v_scale, v_zero, lane, factor,
    FORMAT: tl.constexpr, KW: tl.constexpr, VW: tl.constexpr, PAIRS: tl.constexpr, AXIS: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Scales of words of K and V; for scores factor, shift by the query's sum; log2, inverse of V's scale; V's zero."""
    if FORMAT == GROUPS:
        vx = spread_scales(v_scale, AXIS == 0, VW)
        if AXIS == 0:
            vx = packed(vx, ASM)
        scales = (spread_scales(k_scale, False, KW), vx, factor, factor, factor, factor, factor)
    else:
        v_scale, v_zero = halves(v_scale, lane, PAIRS), halves(v_zero, lane, PAIRS)
        least = tl.where(v_scale < LEAST_SCALE, LEAST_SCALE, v_scale)  # equal values have the scale 0
        v_log = log2(least, ASM)
        k_factor = halves(k_scale, lane, PAIRS) * factor
        shift = k_factor
        if FORMAT == INT4:
            shift, v_zero = k_factor * zero_point(k_scale), zero_point(v_scale) - CENTRE
        else:
            v_zero += CENTRE * least
        scales = (
            k_scale, v_scale, per_token(k_factor, AXIS), per_token(shift, AXIS), per_token(v_log, AXIS),
            per_token(exp2(-v_log, ASM), AXIS), per_token(v_zero, AXIS),
        )  # fmt: skip
    return scales


@triton.jit
def _weigh(
    s, top, new, mass, low, v_inverse, v_zero, visible,
    FORMAT: tl.constexpr, MASKED: tl.constexpr, KEEP: tl.constexpr, AXIS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Weights (fp16) of a set's scores s, the factor for its outputs, and its maximum, mass and zeros' share after."""
    p, decay, top = softmax_set(s, top, new, AXIS, ASM)
    decay = per_row(decay, AXIS)
    weight = p
    if FORMAT != GROUPS:
        weight = p * v_inverse
        if MASKED:
            weight = tl.where(visible, weight, 0.0)  # the scale of a token that nobody sees may be NaN
    mass = mass * decay + token_sums(weight, KEEP, AXIS)
    p = p.to(tl.float16)
    if FORMAT == INT4:
        low = low * decay + token_sums(p.to(tl.float32) * v_zero, KEEP, AXIS)
    elif FORMAT == TURBOQUANT:
        share = weight * v_zero
        if MASKED:
            share = tl.where(visible, share, 0.0)
        low = low * decay + token_sums(share, KEEP, AXIS)
    return p, decay, (top, mass, low)


@triton.jit
def tile_step(  # noqa: C901, PLR0912
    kw, vw, k_scale, v_scale, v_zero, token, constants, sums, outputs, factor,
    FORMAT: tl.constexpr, KW: tl.constexpr, KZ: tl.constexpr, KF: tl.constexpr, VW: tl.constexpr, VZ: tl.constexpr,
    VF: tl.constexpr, PAIRS: tl.constexpr, SETS: tl.constexpr, MASKED: tl.constexpr, KEEP: tl.constexpr,
    AXIS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """One tile for all sets of rows: words kw [TILE, WORDS], vw alike (AXIS 1) or [WORDS, TILE]; token numbers [TILE].

    Scales [TILE] or [TILE, GROUPS], those of V as its words are. constants: a set's query parts, sum and first unseen
    token; sums: its maximum, mass and zeros' share; outputs: one a code and set. Returns both, new.
    """
    TILE: tl.constexpr = kw.shape[0]
    kx, vx, k_factor, shift, v_log, v_inverse, v_zero = tile_scales(
        k_scale, v_scale, v_zero, tl.arange(0, TILE), factor, FORMAT, KW, VW, PAIRS, AXIS, ASM
    )
    if AXIS == 1:
        kw = tl.trans(kw)
        if FORMAT == GROUPS:
            kx = tl.trans(kx)
    scores = ()
    for _ in tl.static_range(SETS):
        scores += (by_rows(TILE, AXIS),)
    for number in tl.static_range(KW):
        k = key_number(kw, kx, number, FORMAT, KW, KZ, KF, ASM)
        added = ()
        for i in tl.static_range(SETS):
            added += (product(k, constants[i][0][number], scores[i], AXIS),)
        scores = added
    logits = ()
    for i in tl.static_range(SETS):
        s = scores[i] * k_factor
        if FORMAT == INT4:
            s += v_log - per_row(constants[i][1], AXIS) * shift
        elif FORMAT == TURBOQUANT:
            s += v_log
        if MASKED:
            s = tl.where(per_token(token, AXIS) < per_row(constants[i][2], AXIS), s, float("-inf"))
        logits += (s,)
    tops = largest_scores(logits, AXIS)
    weights = ()
    decays = ()
    new_sums = ()
    for i in tl.static_range(SETS):
        top, mass, low = sums[i]
        visible = None
        if MASKED:
            visible = per_token(token, AXIS) < per_row(constants[i][2], AXIS)
        p, decay, after = _weigh(
            logits[i], top, tops[i], mass, low, v_inverse, v_zero, visible, FORMAT, MASKED, KEEP, AXIS, ASM
        )
        weights += (p,)
        decays += (decay,)
        new_sums += (after,)
    new_outputs = ()
    for number in tl.static_range(VW):
        v = value_number(vw, vx, number, FORMAT, VW, VZ, VF, ASM)
        added = ()
        for i in tl.static_range(SETS):
            added += (product(v, weights[i], outputs[number][i] * decays[i], AXIS),)
        new_outputs += (added,)
    return new_sums, new_outputs


settle(globals())
