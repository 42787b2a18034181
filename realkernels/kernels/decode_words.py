"""Decode attention over caches whose rows are 16-bit words of two or four codes: int4, groups of 32, TurboQuant.

What a codec does is in its `WordCodec`: how codes become numbers and where scales and zero points go. V scales per
token join the exponent: p v_scale = 2^(s + log2 v_scale - top) are the weights of the codes, the sum of p is taken
from p v_scale / v_scale, and what zero points add to all elements alike is summed apart.

One loop has two steps. `narrow_step`: few query rows in sets of 8 as columns or of 16 as rows (`query_sets.py`).
`wide_step`: many query rows as columns, a tile dequantised once for up to 64 of them, in sets as wide as powers of two
allow. On Hopper four warps multiply together there where words and tokens are 64 or more: the dequantised tile comes
from registers, queries and weights from shared memory. It rescales outputs only where scores pass what weights are
relative to by more than a few powers of two: an exact choice, since all that a row has summed is relative to one
number.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton
import triton.language as tl

from realkernels.kernels.arithmetic import exp2, halves, largest, log2, packed, power_below, tiny_unit
from realkernels.kernels.combine_splits import combine_splits, element
from realkernels.kernels.query_sets import (
    by_rows,
    largest_scores,
    per_row,
    per_token,
    product,
    query_part,
    set_count,
    set_rows,
    set_width,
    softmax_set,
    store_set,
    token_sums,
)
from realkernels.kernels.split_kv import (
    LOG2E,
    TilePlan,
    Workspace,
    alignment,
    checked_call,
    load_rows,
    read_page,
    tiles_of_split,
)
from realkernels.kernels.stable_keys import stable_keys

QUERY_TOP: tl.constexpr = tl.constexpr(512.0)
"""Queries are brought to fp16 with their largest magnitude in [512, 1024)."""
LEAST_SCALE: tl.constexpr = tl.constexpr(2.0**-24)
SLACK: tl.constexpr = tl.constexpr(8.0)
"""Scores (base 2) may pass what weights are relative to by this much before everything is rescaled."""
GROUP_ELEMENTS = 32


@dataclass(frozen=True, kw_only=True)
class Codes:
    """Words of K or V, and the numbers in them."""

    number: Any
    """Compile-time function (words, scales, number, ASM) -> fp16: code `number` of words, as the products take it."""
    per_word: int = 4
    """4 or 2: codes of 4 or 8 bits."""
    unit: float = 1.0
    """What numbers are multiplied by after the products."""


@dataclass(frozen=True, kw_only=True)
class WordCodec:
    """What a codec of 16-bit words does in `attend_words`."""

    key: Codes
    value: Codes
    zero: Literal["", "code", "value"] = ""
    """Scales are of groups of 32 without zero points; or per token with zero points in codes, or of V in its unit."""
    zeros: Any = None
    """Compile-time function (K's and V's scales, V's with a least one, V's plane of zeros) -> zeros of K and of V, of
    scales per token, all fp32 [TILE]."""
    planes: tuple[str, str, str] = ("key_scale", "value_scale", "value_scale")
    """Names of the views: scales of K, scales and zeros of V."""
    score_unit: Callable[[int], float] = lambda _head_dim: 1.0
    """By the head size: what scores are multiplied by beside."""
    ggml: bool = False
    """Word w of a group of 32 holds elements 2w, 2w + 16, 2w + 1, 2w + 17, not 4w to 4w + 3."""


@triton.constexpr_function
def query_unit(number, zero):
    """What a query part is multiplied by since `tiny_code` reads codes with different powers of two."""
    return 16.0 ** -(number % 2) if zero == "code" else 1.0


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
        if ZERO == "":
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
        if ZERO != "":
            weight = p * v_inverse
            if MASKED:
                weight = tl.where(visible, weight, 0.0)  # the scale of a token that nobody sees may be NaN
        mass = mass * decay + token_sums(weight, mass.shape[AXIS], AXIS)
        p = p.to(tl.float16)
        if ZERO != "":
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
        if ZERO != "":
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
        if ZERO != "":
            weight = weight * v_inverse
            share = (p.to(tl.float32) if ZERO == "code" else weight) * v_zero
            if MASKED:  # the scale of a token that a row does not see may be NaN
                visible = token[:, None] < constants[i][2][None, :]
                weight, share = tl.where(visible, weight, 0.0), tl.where(visible, share, 0.0)
            low += _in_thread(share, low.shape[0])
        after += ((base, mass + _in_thread(weight, mass.shape[0]), low),)
        weights += (p,)
    return after, _outputs(vw, vx, weights, outputs, (), VALUE, AXIS, ASM)


@triton.jit
def _query_codes(
    query, k_word, rows, batch, kv_head, q_batch, q_token, q_head, big,
    KW: tl.constexpr, GGML: tl.constexpr, Q_TOKENS: tl.constexpr, GROUP: tl.constexpr, AXIS: tl.constexpr,
):  # fmt: skip
    """A set's query in KW parts, the elements of each code of K's words; the larger of `big` and its magnitudes."""
    parts = ()
    for number in tl.static_range(KW):
        part = query_part(
            query, element(k_word, number, KW, GGML), rows, batch, kv_head, q_batch, q_token, q_head, Q_TOKENS, GROUP,
            AXIS,
        )  # fmt: skip
        big = tl.maximum(big, largest(part))
        parts += (part,)
    return parts, big


@triton.jit
def _nothing_seen(N: tl.constexpr, WIDE: tl.constexpr, KEEP: tl.constexpr, AXIS: tl.constexpr):
    """State of a set of N rows."""
    if WIDE:
        none = tl.zeros([KEEP, 8, N], tl.float32)
        state = (tl.zeros([N], tl.float32), none, none)
    else:
        state = (tl.full([N], float("-inf"), tl.float32), by_rows(KEEP, N, AXIS), by_rows(KEEP, N, AXIS))
    return state


@triton.jit
def _load_scales(at, inside, GROUPED: tl.constexpr, MASKED: tl.constexpr, AXIS: tl.constexpr):
    """Scales of tokens, or of their groups as `load_rows`."""
    if GROUPED:
        scales = load_rows(at, inside, MASKED, AXIS, "")
    else:
        scales = tl.load(at, mask=inside, other=0) if MASKED else tl.load(at)
    return scales


@triton.jit
def _loads(
    k_at, v_at, ks_at, vs_at, vz_at, inside, ZERO: tl.constexpr, MASKED: tl.constexpr, AXIS: tl.constexpr
):  # fmt: skip
    """Words and scales of a tile; where MASKED zeros for tokens that are not inside."""
    GROUPED: tl.constexpr = ZERO == ""
    kw, ks = load_rows(k_at, inside, MASKED, 1, ""), _load_scales(ks_at, inside, GROUPED, MASKED, 1)
    vw, vs = load_rows(v_at, inside, MASKED, AXIS, ""), _load_scales(vs_at, inside, GROUPED, MASKED, AXIS)
    vz = vs
    if ZERO == "value":
        vz = _load_scales(vz_at, inside, GROUPED, MASKED, AXIS)
    return kw, ks, vw, vs, vz


@triton.jit(do_not_specialize=["splits"])
def _attend_words(  # noqa: C901, PLR0912
    query, keys, values, key_scale, value_scale, value_zero, table, lengths, partial, statistics, softmax_scale, v_unit,
    q_batch, q_token, q_head, table_batch, splits,
    K_PAGE: tl.constexpr, K_HEAD: tl.constexpr, K_TOKEN: tl.constexpr, K_GROUP: tl.constexpr,
    V_PAGE: tl.constexpr, V_HEAD: tl.constexpr, V_TOKEN: tl.constexpr, V_GROUP: tl.constexpr,
    S_PAGE: tl.constexpr, S_HEAD: tl.constexpr, S_TOKEN: tl.constexpr, S_GROUP: tl.constexpr,
    KEY: tl.constexpr, VALUE: tl.constexpr, ZEROS: tl.constexpr, KW: tl.constexpr, VW: tl.constexpr,
    ZERO: tl.constexpr, GGML: tl.constexpr, PAIRS: tl.constexpr, ALIGN: tl.constexpr, PAGE: tl.constexpr,
    Q_TOKENS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    STEP: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, SET: tl.constexpr, KEEP: tl.constexpr,
    TILE: tl.constexpr, AXIS: tl.constexpr, ASM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One split of one sequence and KV head; see `attend_words` for the arguments.

    A thread block has ROWS query rows in sets of SET at most. Sums over a row's tokens are kept for KEEP tokens, or of
    WIDE for KEEP warps.
    """
    SETS: tl.constexpr = set_count(ROWS, SET)
    block = tl.program_id(0) // (HEADS // GROUP)
    kv_head = tl.program_id(0) % (HEADS // GROUP)
    split = tl.program_id(1)
    batch = tl.program_id(2)
    k_word = tl.arange(0, DIM // KW)
    v_word = tl.arange(0, DIM // VW)
    lane = tl.arange(0, TILE)
    length = tl.load(lengths + batch)
    first, last = tiles_of_split(length, split, splits, TILE)
    whole = tl.minimum(tl.maximum(length - Q_TOKENS + 1, 0) // TILE, last)  # tiles before it: every row sees all of it
    table += batch * table_batch
    page = tl.load(table + first * TILE // PAGE, mask=first < last, other=0).to(tl.int64)
    loaded = ()
    big = 0.0
    for i in tl.static_range(SETS):
        rows = set_rows(block, i, ROWS, SET)
        q, big = _query_codes(
            query, k_word, rows, batch, kv_head, q_batch, q_token, q_head, big, KW, GGML, Q_TOKENS, GROUP, AXIS
        )
        loaded += (q,)
    power = power_below(big) / QUERY_TOP
    factor = power * softmax_scale
    constants = ()
    state = ()
    for i in tl.static_range(SETS):
        rows = set_rows(block, i, ROWS, SET)
        q = loaded[i]
        if WIDE:  # loaded again: registers do not hold all of it
            q, _ = _query_codes(
                query, k_word, rows, batch, kv_head, q_batch, q_token, q_head, big, KW, GGML, Q_TOKENS, GROUP, AXIS
            )
        parts = ()
        total = tl.zeros([set_width(ROWS, SET, i)], tl.float32)
        for number in tl.static_range(KW):
            part = (q[number] * (query_unit(number, ZERO) / power)).to(tl.float16)
            total += tl.sum(part.to(tl.float32), axis=AXIS) / (query_unit(number, ZERO) * tiny_unit(0, 4))
            parts += (part,)
        constants += ((parts, total, length - Q_TOKENS + rows // GROUP + 1),)
        state += (_nothing_seen(set_width(ROWS, SET, i), WIDE, KEEP, AXIS),)
    outputs = ()
    for _number in tl.static_range(VW):
        o = ()
        for i in tl.static_range(SETS):
            o += (by_rows(DIM // VW, set_width(ROWS, SET, i), AXIS),)
        outputs += (o,)
    if ZERO == "code":
        factor *= tiny_unit(0, 4)
    k_column = k_word if K_GROUP == 32 // KW else k_word // (32 // KW) * K_GROUP + k_word % (32 // KW)
    v_column = v_word if V_GROUP == 32 // VW else v_word // (32 // VW) * V_GROUP + v_word % (32 // VW)
    k_at = tl.multiple_of(keys + kv_head * K_HEAD, ALIGN) + (lane * K_TOKEN)[:, None] + k_column[None, :]
    v_at = tl.multiple_of(values + kv_head * V_HEAD, ALIGN)
    v_at = v_at + tl.expand_dims(lane * V_TOKEN, AXIS) + tl.expand_dims(v_column, 1 - AXIS)
    ONE: tl.constexpr = 2 if PAIRS else 1  # tokens that an element of the scales holds
    GROUPED: tl.constexpr = ZERO == ""
    s_at = kv_head * (S_HEAD // ONE) + lane // ONE * S_TOKEN
    t_at = s_at
    if GROUPED:
        group = tl.arange(0, DIM // 32) * S_GROUP
        t_at = tl.expand_dims(s_at, AXIS) + tl.expand_dims(group, 1 - AXIS)
        s_at = s_at[:, None] + group[None, :]
    for masked in tl.static_range(2):
        begin = tl.maximum(first, whole) if masked else first
        end = last if masked else whole
        for tile in tl.range(begin, end, num_stages=1 if masked else STAGES):
            following = page
            if masked:
                page = tl.load(table + tile * TILE // PAGE).to(tl.int64)
            else:
                following = read_page(table, tl.minimum(tile + 1, last - 1) * TILE // PAGE, ASM)
            row = tile * TILE % PAGE
            token = tile * TILE + lane
            s_row = page * (S_PAGE // ONE) + row // ONE * S_TOKEN
            kw, ks, vw, vs, vz = _loads(
                k_at + (page * K_PAGE + row * K_TOKEN), v_at + (page * V_PAGE + row * V_TOKEN),
                key_scale + s_at + s_row, value_scale + t_at + s_row, value_zero + t_at + s_row,
                token < length, ZERO, masked, AXIS,
            )  # fmt: skip
            page = following
            state, outputs = STEP(
                kw, vw, ks, vs, vz, token, constants, state, outputs, factor, tile == first,
                KEY, VALUE, ZEROS, KW, VW, ZERO, PAIRS, masked, AXIS, ASM,
            )  # fmt: skip
    for i in tl.static_range(SETS):
        rows = set_rows(block, i, ROWS, SET)
        top, mass, low = state[i]
        if WIDE:
            seen = length - Q_TOKENS + rows // GROUP + 1 > first * TILE
            top = tl.where(seen & (first < last), top, float("-inf"))
            mass, low = tl.sum(mass, axis=0), tl.sum(low, axis=0)
        mass, low = tl.sum(mass, axis=AXIS), per_row(tl.sum(low, axis=AXIS), AXIS)
        for number in tl.static_range(VW):
            o = outputs[number][i]
            if GROUPED:
                o *= v_unit
            elif ZERO == "code":
                o -= low
            else:
                o += low
            store_set(
                partial, statistics, o, top, mass, batch, split, kv_head, rows, number * (DIM // VW) + v_word,
                Q_TOKENS, HEADS, GROUP, splits, DIM, AXIS,
            )  # fmt: skip


def _words(plane: torch.Tensor, codes: Codes, shape: torch.Size, head_dim: int) -> torch.Tensor:
    """int16 [pages, kv_heads, page_tokens, groups, words of a group]; ValueError for a plane that is none."""
    width = GROUP_ELEMENTS // codes.per_word
    words = plane.view(torch.int16)
    if words.dim() == 4 and words.shape[3] % width == 0:
        words = words.unflatten(3, (-1, width))
    if tuple(words.shape) != (*shape[:3], head_dim // GROUP_ELEMENTS, width) or words.stride(4) != 1:
        raise ValueError(
            f"words {tuple(words.shape)} {words.stride()} and a head_dim of {head_dim} do not belong together"
        )
    return words


def _scale_planes(
    views: Mapping[str, torch.Tensor], codec: WordCodec, shape: tuple[int, ...]
) -> tuple[list[torch.Tensor], bool]:
    """Scales of K, of V and zeros of V, and whether two tokens' are neighbours that one int32 holds."""
    planes = [views[name] for name in codec.planes]
    first = planes[0]
    for plane in planes:
        if tuple(plane.shape) != shape or plane.stride() != first.stride():
            raise ValueError(f"scales {tuple(plane.shape)} {plane.stride()} are not {shape} {first.stride()}")
    pairs = first.dtype == torch.float16 and first.dim() == 3 and first.stride(2) == 1
    pairs = pairs and all(step % 2 == 0 for step in first.stride()[:2])
    if pairs and all(plane.data_ptr() % 4 == 0 for plane in planes):
        return [plane.view(torch.int32) for plane in planes], True
    return planes, False


def attend_words(
    query: torch.Tensor, views: Mapping[str, torch.Tensor], page_table: torch.Tensor, lengths: torch.Tensor,
    out: torch.Tensor, workspace: Workspace, *, codec: WordCodec, plan: TilePlan, softmax_scale: float,
) -> torch.Tensor:  # fmt: skip
    """Attention of each sequence's newest q_tokens tokens over words of codes, into `out`, in the stored basis.

    query and out [batch, q_tokens, query_heads, head_dim]; key_data and value_data of `views` uint8 [pages, kv_heads,
    page_tokens, bytes of a row] or [.., groups, bytes of 32 elements] with even strides, the last 1 (rows without gaps
    and of multiples of 4 bytes let loads be asynchronous); planes of scales [pages, kv_heads, page_tokens] or [..,
    groups], of equal strides. page_table int32 [batch, max_pages], lengths int32 [batch], new tokens included. Query i
    of q sees the first lengths - q + i + 1 tokens; one that sees none gets zeros. Two launches, no host
    synchronisation; page numbers and lengths are trusted.
    """
    head_dim = query.shape[3]
    words = [
        _words(views[name], codes, views["key_data"].shape, head_dim)
        for name, codes in (("key_data", codec.key), ("value_data", codec.value))
    ]
    one = words[0][:, :, :, 0]
    call = checked_call(query, one, one, page_table, lengths, out, workspace, width=one.shape[3])
    shape = words[0].shape[:3] if codec.zero else words[0].shape[:4]
    scales, pairs = _scale_planes(views, codec, tuple(shape))
    tile = min(plan.tile, call.page_tokens)
    wide = plan.sets == 1 and plan.rows > 16
    if plan.rows % 8 or plan.rows > (64 if wide else 16):
        raise ValueError(f"sets have 8 or 16 rows, a single one any multiple of 8 up to 64, not {plan.rows}")
    axis = 0 if wide else plan.rows // 8 - 1
    keep = min(plan.num_warps, tile // 16) if wide else min(tile, (16, 8)[axis] * plan.num_warps)
    page, head, token, group = (*scales[0].stride(), 0)[:4]
    ones = 2 if pairs else 1
    _attend_words[(call.kv_heads * plan.blocks(call.q_rows), workspace.splits, call.batch)](
        query, *words, *scales, page_table, lengths, workspace.partial, workspace.statistics,
        softmax_scale * LOG2E * codec.score_unit(head_dim) * codec.key.unit, codec.value.unit,
        query.stride(0), query.stride(1), query.stride(2), page_table.stride(0), workspace.splits,
        *words[0].stride()[:4], *words[1].stride()[:4], ones * page, ones * head, token, group,
        KEY=codec.key.number, VALUE=codec.value.number, ZEROS=codec.zeros, KW=codec.key.per_word,
        VW=codec.value.per_word, ZERO=codec.zero, GGML=codec.ggml, PAIRS=pairs, ALIGN=alignment(*words),
        PAGE=call.page_tokens, Q_TOKENS=call.q_tokens, HEADS=call.query_heads, GROUP=call.group, DIM=head_dim,
        STEP=wide_step if wide else narrow_step, WIDE=wide, ROWS=plan.rows * plan.sets, SET=64 if wide else plan.rows,
        KEEP=keep, TILE=tile, AXIS=axis, ASM=query.device.type == "cuda", STAGES=plan.stages,
        num_warps=plan.num_warps,
    )  # fmt: skip
    return combine_splits(workspace, out, per_word=codec.value.per_word, ggml=codec.ggml)


stable_keys(globals())
