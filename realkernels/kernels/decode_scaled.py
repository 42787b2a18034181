"""Decode attention over 8-bit caches, with a scale per token and head or one for a tensor.

K scales multiply scores, V scales join the exponent (p v_scale = 2^(s + log2 v_scale - top), divided out of the sum of
p), so that no element is multiplied. Two bytes of a row are read as one word, so that the words of a tile reach the
registers of a product as 16-bit operands do (a transposed read of single bytes does not exist before Blackwell). A word
gives one number of the even and one of the odd elements; with either half of the query, or of the output, two products
add up. Products are fp16 with fp32 sums. Queries are scaled by powers of two, so that none overflows fp16.

One loop has two steps. `rows_step`: queries are the rows of products, in up to three sets that share a dequantised
tile. `columns_step`, for more query rows: scores [TILE, N], outputs [words, N]. Dequantised codes are the left operand
of both products and go from words to the matrix units through registers alone; queries and weights are the right one.
Words come in chunks there, so that few are held at a time.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from realkernels.jit import tl, triton
from realkernels.kernels.arithmetic import exp2, log2, power_below
from realkernels.kernels.query_sets import set_count, set_rows, set_width, softmax_set
from realkernels.kernels.split_kv import (
    LOG2E,
    TilePlan,
    Workspace,
    alignment,
    checked_call,
    combine_splits,
    load_rows,
    page_of_tile,
    store_part,
    tile_rows,
    tiles_of_split,
)

FLOOR: tl.constexpr = tl.constexpr(-1e30)
"""Maximum of no scores among columns: finite, so that nothing is subtracted from itself as infinity."""


@dataclass(frozen=True, kw_only=True)
class ScaledCodec:
    """How a codec of 8 bits becomes numbers in `attend_scaled`."""

    numbers: Any
    """Compile-time function (words, ASM) -> two fp16 numbers of each word, of the even and of the odd elements."""
    key_numbers: Any
    """Likewise of K where queries are rows: number / key_unit + key_shift / key_unit, if that is cheaper."""
    key_unit: float = 1.0
    key_shift: float = 0.0


@triton.jit
def _query_halves(
    query, q_token, q_head, rows, kv_head,
    Q_TOKENS: tl.constexpr, GROUP: tl.constexpr, WORDS: tl.constexpr, CHUNKS: tl.constexpr, AXIS: tl.constexpr,
):  # fmt: skip
    """fp32 [WORDS, N] or [N, WORDS] of a set of rows [N]: even and odd elements of each chunk; zeros beyond rows."""
    live = tl.expand_dims(rows < Q_TOKENS * GROUP, AXIS)
    row_at = rows // GROUP * q_token + (kv_head * GROUP + rows % GROUP) * q_head
    at = tl.expand_dims(row_at, AXIS) + 2 * tl.expand_dims(tl.arange(0, WORDS), 1 - AXIS)
    parts = ()
    for part in tl.static_range(2 * CHUNKS):
        x = tl.load(query + at + part // 2 * (2 * WORDS) + part % 2, mask=live, other=0.0).to(tl.float32)
        parts += (x,)
    return parts


@triton.jit
def _words(at, inside, first, WORDS: tl.constexpr, MASKED: tl.constexpr, AXIS: tl.constexpr):
    """Words `first` and after of rows at pointers, along AXIS; zeros where rows are not inside."""
    return load_rows(at + tl.expand_dims(first + tl.arange(0, WORDS), 1 - AXIS), inside, MASKED, AXIS)


@triton.jit
def _value_scale(v_scale, PER_TOKEN: tl.constexpr, ASM: tl.constexpr):
    """Logarithm to base 2 of V's scales and their inverse."""
    v_log, v_inverse = 0.0, 0.0
    if PER_TOKEN:
        v_log = log2(tl.where(v_scale < 1e-30, 1e-30, v_scale), ASM)  # NaN stays
        v_inverse = exp2(-v_log, ASM)
    return v_log, v_inverse


# Queries as rows


@triton.jit
def _largest_of_2(a0, a1, b0, b1):
    return tl.maximum(a0, b0), tl.maximum(a1, b1)


@triton.jit
def _largest_of_3(a0, a1, a2, b0, b1, b2):
    return tl.maximum(a0, b0), tl.maximum(a1, b1), tl.maximum(a2, b2)


@triton.jit
def _row_maxima(s, SETS: tl.constexpr):
    """Largest score of each row, for 1 to 3 sets [ROWS, TILE]: one exchange between warps for all of them."""
    if SETS == 1:
        best = (tl.max(s[0], axis=1),)
    elif SETS == 2:
        best = tl.reduce((s[0], s[1]), 1, _largest_of_2)
    else:
        best = tl.reduce((s[0], s[1], s[2]), 1, _largest_of_3)
    return best


@triton.jit
def _row_set(
    query, q_token, q_head, key_scale, softmax_scale, length, rows, kv_head,
    Q_TOKENS: tl.constexpr, GROUP: tl.constexpr, WORDS: tl.constexpr, TILE: tl.constexpr, UNIT: tl.constexpr,
    SHIFT: tl.constexpr, PER_TOKEN: tl.constexpr,
):  # fmt: skip
    """Constant and running parts of a set of rows; scores are dot products x factor - shift."""
    qe, qo = _query_halves(query, q_token, q_head, rows, kv_head, Q_TOKENS, GROUP, WORDS, 1, 1)
    power = power_below(tl.maximum(tl.max(tl.abs(qe), axis=1), tl.max(tl.abs(qo), axis=1)))
    qe = (qe / power[:, None]).to(tl.float16)  # below 2, and as exact as before
    qo = (qo / power[:, None]).to(tl.float16)
    factor = power * softmax_scale
    shift = (tl.sum(qe.to(tl.float32), axis=1) + tl.sum(qo.to(tl.float32), axis=1)) * SHIFT * factor
    if not PER_TOKEN:
        factor *= tl.load(key_scale)
    if UNIT != 1.0:
        factor *= UNIT
    seen = length - Q_TOKENS + rows // GROUP + 1
    top = tl.full([rows.shape[0]], float("-inf"), tl.float32)
    mass = tl.zeros([rows.shape[0], TILE], tl.float32)
    o = tl.zeros([rows.shape[0], WORDS], tl.float32)
    return (qe, qo, factor, shift, seen), (top, mass, o, o)


@triton.jit
def _scores(
    constant, ke, ko, token, k_scale, v_log, SHIFT: tl.constexpr, PER_TOKEN: tl.constexpr, MASKED: tl.constexpr
):
    """Scores [ROWS, TILE] of one set of rows in base 2, log2 of the V scale added."""
    qe, qo, factor, shift, seen = constant
    s = tl.dot(qe, tl.trans(ke))
    s = tl.dot(qo, tl.trans(ko), s)
    s = s * factor[:, None] if SHIFT == 0.0 else s * factor[:, None] - shift[:, None]
    if PER_TOKEN:
        s = s * k_scale[None, :] + v_log[None, :]
    if MASKED:
        s = tl.where(token[None, :] < seen[:, None], s, float("-inf"))
    return s


@triton.jit
def _weigh(
    s, best, running, token, seen, v_inverse,
    PER_TOKEN: tl.constexpr, MASKED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Weights fp16 [ROWS, TILE] of a tile for one set of rows, and its running parts without the tile's values."""
    top, mass, oe, oo = running
    p, decay, new = softmax_set(s, top, best, 1, ASM)
    weight = p
    if PER_TOKEN:
        weight = p * v_inverse[None, :]
    if MASKED:
        weight = tl.where(token[None, :] < seen[:, None], weight, 0.0)
    mass = mass * decay[:, None] + weight
    return p.to(tl.float16), (new, mass, oe * decay[:, None], oo * decay[:, None])


@triton.jit
def rows_step(
    kp, vp, sk, sv, inside, token, _factor, constants, runnings,
    KEY: tl.constexpr, VALUE: tl.constexpr, SHIFT: tl.constexpr, WORDS: tl.constexpr, _CHUNKS: tl.constexpr,
    PER_TOKEN: tl.constexpr, MASKED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """One tile for all sets of rows: words from kp and vp [TILE, 1], scales at sk and sv; the running parts after."""
    SETS: tl.constexpr = len(constants)
    kw = _words(kp, inside, 0, WORDS, MASKED, 1)
    vw = _words(vp, inside, 0, WORDS, MASKED, 1)
    k_scale, v_scale = _scales(sk, sv, inside, PER_TOKEN, MASKED)
    v_log, v_inverse = _value_scale(v_scale, PER_TOKEN, ASM)
    ke, ko = KEY(kw, ASM)
    scores = ()
    for i in tl.static_range(SETS):
        scores += (_scores(constants[i], ke, ko, token, k_scale, v_log, SHIFT, PER_TOKEN, MASKED),)
    tops = _row_maxima(scores, SETS)
    weighed = ()
    for i in tl.static_range(SETS):
        weighed += (_weigh(scores[i], tops[i], runnings[i], token, constants[i][4], v_inverse, PER_TOKEN, MASKED, ASM),)
    ve, vo = VALUE(vw, ASM)
    after = ()
    for i in tl.static_range(SETS):
        p, running = weighed[i]
        top, mass, oe, oo = running
        after += ((top, mass, tl.dot(p, ve, oe), tl.dot(p, vo, oo)),)
    return after


# Queries as columns


def chunks_of(head_dim: int) -> int:
    """Chunks of the words of a row: 64 words each, which the 64 rows of a product want, or all of a shorter row's."""
    return max(1, head_dim // 128)


@triton.jit
def _unit(parts, big):
    """The larger of `big` and the largest magnitude of parts that is a number."""
    for i in tl.static_range(len(parts)):
        size = tl.abs(parts[i])
        big = tl.maximum(big, tl.max(tl.max(tl.where(size < float("inf"), size, 0.0), axis=1), axis=0))
    return big


@triton.jit
def _narrow(parts, power):
    """Parts divided by a power of two, fp16."""
    narrow = ()
    for i in tl.static_range(len(parts)):
        narrow += ((parts[i] / power).to(tl.float16),)
    return narrow


@triton.jit
def _nothing_seen(N: tl.constexpr, WORDS: tl.constexpr, CHUNKS: tl.constexpr, TILE: tl.constexpr):
    """Running parts of a set of N columns: maxima, sums of weights, outputs."""
    outputs = ()
    for _ in tl.static_range(2 * CHUNKS):
        outputs += (tl.zeros([WORDS, N], tl.float32),)
    return tl.full([N], FLOOR, tl.float32), tl.zeros([TILE // 16, 8, N], tl.float32), outputs


@triton.jit
def _in_thread(x):
    """Weights [TILE, N] summed over tokens t and t + 8 of each 16, which one thread holds."""
    return tl.sum(x.reshape(x.shape[0] // 16, 2, 8, x.shape[1]), axis=1)


@triton.jit
def columns_step(  # noqa: C901, PLR0912
    kp, vp, sk, sv, inside, token, factor, constants, runnings,
    _KEY: tl.constexpr, VALUE: tl.constexpr, _SHIFT: tl.constexpr, WORDS: tl.constexpr, CHUNKS: tl.constexpr,
    PER_TOKEN: tl.constexpr, MASKED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """As `rows_step`, of vp [1, TILE].

    Several sets leave no registers for the words of V during the softmax: they are loaded where they are used.
    """
    SETS: tl.constexpr = len(constants)
    SOON: tl.constexpr = SETS == 1
    k_scale, v_scale = _scales(sk, sv, inside, PER_TOKEN, MASKED)
    vw = ()
    if SOON:
        for c in tl.static_range(CHUNKS):
            vw += (_words(vp, inside, c * WORDS, WORDS, MASKED, 0),)
    scores = ()
    for i in tl.static_range(SETS):
        scores += (tl.zeros([token.shape[0], constants[i][1].shape[0]], tl.float32),)
    for c in tl.static_range(CHUNKS):
        w = _words(kp, inside, c * WORDS, WORDS, MASKED, 1)
        ke, ko = VALUE(w, ASM)
        added = ()
        for i in tl.static_range(SETS):
            s = tl.dot(ke, constants[i][0][2 * c], scores[i])
            added += (tl.dot(ko, constants[i][0][2 * c + 1], s),)
        scores = added
    v_log, v_inverse = _value_scale(v_scale, PER_TOKEN, ASM)
    if PER_TOKEN:
        factor = (k_scale * factor)[:, None]
    weights = ()
    decays = ()
    sums = ()
    for i in tl.static_range(SETS):
        top, mass, _ = runnings[i]
        s = scores[i] * factor
        if PER_TOKEN:
            s += v_log[:, None]
        if MASKED:
            visible = token[:, None] < constants[i][1][None, :]
            s = tl.where(visible, s, float("-inf"))
        new = tl.maximum(top, tl.max(s, axis=0))
        p = exp2(s - new[None, :], ASM)
        decay = exp2(top - new, ASM)
        weight = p
        if PER_TOKEN:
            weight = p * v_inverse[:, None]
        if MASKED:
            weight = tl.where(visible, weight, 0.0)
        weights += (p.to(tl.float16),)
        decays += (decay[None, :],)
        sums += ((new, mass * decay[None, None, :] + _in_thread(weight)),)
    outputs = ()
    for c in tl.static_range(CHUNKS):
        w = vw[c] if SOON else _words(vp, inside, c * WORDS, WORDS, MASKED, 0)
        ve, vo = VALUE(w, ASM)
        for i in tl.static_range(SETS):
            held = runnings[i][2]
            outputs += (tl.dot(ve, weights[i], held[2 * c] * decays[i]),)
            outputs += (tl.dot(vo, weights[i], held[2 * c + 1] * decays[i]),)
    after = ()
    for i in tl.static_range(SETS):
        mine = ()
        for c in tl.static_range(CHUNKS):
            mine += (outputs[2 * (c * SETS + i)], outputs[2 * (c * SETS + i) + 1])
        after += ((sums[i][0], sums[i][1], mine),)
    return after


# The loop


@triton.jit
def _scales(sk, sv, inside, PER_TOKEN: tl.constexpr, MASKED: tl.constexpr):
    """A tile's scales of K and V [TILE]."""
    k_scale, v_scale = 0.0, 0.0
    if PER_TOKEN:
        k_scale = tl.load(sk, mask=inside, other=0.0) if MASKED else tl.load(sk)
        v_scale = tl.load(sv, mask=inside, other=1.0) if MASKED else tl.load(sv)
    return k_scale, v_scale


@triton.jit
def _pointers(
    keys, values, key_scale, value_scale, page, start, lane,
    K_PAGE: tl.constexpr, K_TOKEN: tl.constexpr, V_PAGE: tl.constexpr, V_TOKEN: tl.constexpr, S_PAGE: tl.constexpr,
    S_TOKEN: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """To the rows of a tile in planes of K and V, and to its scales."""
    kp = tile_rows(keys, page, start, lane, K_PAGE, K_TOKEN, PAGE, TILE, WHOLE, 1)
    vp = tile_rows(values, page, start, lane, V_PAGE, V_TOKEN, PAGE, TILE, WHOLE, 0 if ACROSS else 1)
    if PAGE % TILE == 0 and WHOLE:
        sp = page * S_PAGE + start % PAGE * S_TOKEN
        sk, sv = key_scale + sp + lane * S_TOKEN, value_scale + sp + lane * S_TOKEN
    else:
        row = start % PAGE + lane if PAGE % TILE == 0 else (start + lane) % PAGE
        sk, sv = key_scale + page * S_PAGE + row * S_TOKEN, value_scale + page * S_PAGE + row * S_TOKEN
    return kp, vp, sk, sv


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=["lengths"])
def _attend_scaled(  # noqa: C901, PLR0912
    query, keys, values, key_scale, value_scale, table, lengths, partial, statistics, softmax_scale,
    q_batch, q_token, q_head, table_batch, splits,
    K_PAGE: tl.constexpr, K_HEAD: tl.constexpr, K_TOKEN: tl.constexpr,
    V_PAGE: tl.constexpr, V_HEAD: tl.constexpr, V_TOKEN: tl.constexpr,
    S_PAGE: tl.constexpr, S_HEAD: tl.constexpr, S_TOKEN: tl.constexpr,
    KEY: tl.constexpr, VALUE: tl.constexpr, UNIT: tl.constexpr, SHIFT: tl.constexpr, PER_TOKEN: tl.constexpr,
    ALIGN: tl.constexpr, PAGE: tl.constexpr, Q_TOKENS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    DIM: tl.constexpr, STEP: tl.constexpr, ACROSS: tl.constexpr, ROWS: tl.constexpr, SET: tl.constexpr,
    CHUNKS: tl.constexpr, TILE: tl.constexpr, ASM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One split of one sequence and KV head, for ROWS query rows in sets of SET at most."""
    split = tl.program_id(1)
    batch = tl.program_id(2)
    kv_head = tl.program_id(0) % (HEADS // GROUP)
    block = tl.program_id(0) // (HEADS // GROUP)
    SETS: tl.constexpr = set_count(ROWS, SET)
    WORDS: tl.constexpr = DIM // 2 // CHUNKS
    lane = tl.arange(0, TILE)
    length = tl.load(lengths + batch)
    query += batch * q_batch
    constants = ()
    runnings = ()
    factor = softmax_scale
    if ACROSS:
        big = 0.0
        queries = ()
        for i in tl.static_range(SETS):
            rows = set_rows(block, i, ROWS, SET)
            parts = _query_halves(query, q_token, q_head, rows, kv_head, Q_TOKENS, GROUP, WORDS, CHUNKS, 0)
            big = _unit(parts, big)
            queries += (parts,)
        power = power_below(big) * 2.0**-14  # the largest is below 2^15: 40 bits down to the least that is not lost
        factor = power * softmax_scale
        if not PER_TOKEN:
            factor *= tl.load(key_scale)
        for i in tl.static_range(SETS):
            rows = set_rows(block, i, ROWS, SET)
            constants += ((_narrow(queries[i], power), length - Q_TOKENS + rows // GROUP + 1),)
            runnings += (_nothing_seen(set_width(ROWS, SET, i), WORDS, CHUNKS, TILE),)
    else:
        for i in tl.static_range(SETS):
            constant, running = _row_set(
                query, q_token, q_head, key_scale, softmax_scale, length, set_rows(block, i, ROWS, SET), kv_head,
                Q_TOKENS, GROUP, WORDS, TILE, UNIT, SHIFT, PER_TOKEN,
            )  # fmt: skip
            constants += (constant,)
            runnings += (running,)
    first, last = tiles_of_split(length, split, splits, TILE)
    whole = tl.minimum(tl.maximum(length - Q_TOKENS + 1, 0) // TILE, last)  # tiles before it: every row sees all of it
    keys = tl.multiple_of(keys + kv_head * K_HEAD, ALIGN)
    values = tl.multiple_of(values + kv_head * V_HEAD, ALIGN)
    key_scale += kv_head * S_HEAD
    value_scale += kv_head * S_HEAD
    table += batch * table_batch
    for masked in tl.static_range(2):
        begin = tl.maximum(first, whole) if masked else first
        end = last if masked else whole
        for tile in tl.range(begin, end, num_stages=1 if masked else STAGES):
            start = tile * TILE
            page = page_of_tile(table, start, lane, length, PAGE, TILE, ASM and not masked)
            kp, vp, sk, sv = _pointers(
                keys, values, key_scale, value_scale, page, start, lane, K_PAGE, K_TOKEN, V_PAGE, V_TOKEN, S_PAGE,
                S_TOKEN, PAGE, TILE, not masked, ACROSS,
            )  # fmt: skip
            token = start + lane
            runnings = STEP(
                kp, vp, sk, sv, token < length, token, factor, constants, runnings,
                KEY, VALUE, SHIFT, WORDS, CHUNKS, PER_TOKEN, masked, ASM,
            )  # fmt: skip
    unit = 1.0
    if not PER_TOKEN:
        unit = tl.load(value_scale)
    for i in tl.static_range(SETS):
        rows = set_rows(block, i, ROWS, SET)
        if ACROSS:
            top, mass, outputs = runnings[i]
            top = tl.where(top == FLOOR, float("-inf"), top)
            mass = tl.sum(tl.sum(mass, axis=0), axis=0)
        else:
            top, mass, oe, oo = runnings[i]
            mass, outputs = tl.sum(mass, axis=1), (oe, oo)
        for c in tl.static_range(CHUNKS):
            oe, oo = outputs[2 * c], outputs[2 * c + 1]
            if ACROSS:
                oe, oo = tl.trans(oe), tl.trans(oo)
            store_part(
                partial, statistics, tl.interleave(oe, oo) * unit, top, mass, batch, split, kv_head, rows,
                c * (2 * WORDS) + tl.arange(0, 2 * WORDS), Q_TOKENS, HEADS, GROUP, splits, DIM,
            )  # fmt: skip


def attend_scaled(
    query: torch.Tensor, views: Mapping[str, torch.Tensor], page_table: torch.Tensor, lengths: torch.Tensor,
    out: torch.Tensor, workspace: Workspace, *, codec: ScaledCodec, plan: TilePlan, softmax_scale: float,
) -> torch.Tensor:  # fmt: skip
    """`DecodeForm.attend`; views key_data and value_data uint8 [pages, kv_heads, page_tokens, head_dim].

    Any even strides (4 bytes and more let loads be asynchronous). key_scale and value_scale fp32, [pages, kv_heads,
    page_tokens] with equal strides, or [1] for a tensor as a whole (where codes enter as they are); positive.
    """
    keys, values = views["key_data"].view(torch.int16), views["value_data"].view(torch.int16)
    key_scale, value_scale = views["key_scale"], views["value_scale"]
    call = checked_call(query, keys, values, page_table, lengths, out, workspace, width=query.shape[3] // 2)
    per_token = key_scale.dim() == 3
    if codec.key_shift and not per_token:
        raise ValueError("int8 caches have a scale per token and head")
    if per_token and (key_scale.stride() != value_scale.stride() or key_scale.shape != keys.shape[:3]):
        raise ValueError(f"scales {tuple(key_scale.shape)} {key_scale.stride()} and {value_scale.stride()}")
    s_page, s_head, s_token = key_scale.stride() if per_token else (0, 0, 0)
    _attend_scaled[(call.kv_heads * plan.blocks(call.q_rows), workspace.splits, call.batch)](
        query, keys, values, key_scale, value_scale, page_table, lengths, workspace.partial, workspace.statistics,
        softmax_scale * LOG2E, query.stride(0), query.stride(1), query.stride(2), page_table.stride(0),
        workspace.splits,
        K_PAGE=keys.stride(0), K_HEAD=keys.stride(1), K_TOKEN=keys.stride(2),
        V_PAGE=values.stride(0), V_HEAD=values.stride(1), V_TOKEN=values.stride(2),
        S_PAGE=s_page, S_HEAD=s_head, S_TOKEN=s_token,
        KEY=codec.key_numbers, VALUE=codec.numbers, UNIT=codec.key_unit, SHIFT=codec.key_shift, PER_TOKEN=per_token,
        ALIGN=alignment(keys, values), PAGE=call.page_tokens, Q_TOKENS=call.q_tokens, HEADS=call.query_heads,
        GROUP=call.group, DIM=call.head_dim, STEP=columns_step if plan.across else rows_step, ACROSS=plan.across,
        ROWS=plan.rows * plan.sets, SET=64 if plan.across else plan.rows,
        CHUNKS=chunks_of(call.head_dim) if plan.across else 1, TILE=plan.tile,
        ASM=query.device.type == "cuda", STAGES=plan.stages, num_warps=plan.num_warps,
    )  # fmt: skip
    return combine_splits(workspace, out)
