"""Decode attention over 8-bit caches for more query rows: tokens and elements are rows of products, queries columns.

The arithmetic is that of `decode_scaled.py` turned over: scores [TILE, COLUMNS], outputs [words, COLUMNS] of the even
and of the odd elements. Converted codes are the left operand of both products and go from words to the matrix units
through registers alone; queries and weights are the right one. Words come in chunks, so that few are held at a time.
"""

import triton
import triton.language as tl

from realkernels.attend.columns import power_below
from realkernels.attend.splits import store_part, tiles_of_split
from realkernels.attend.tiles import exp2, log2, page_of_tile
from realkernels.attend.words import fp8_halves, int8_halves

FLOOR: tl.constexpr = tl.constexpr(-1e30)
"""Maximum of no scores: finite, so that nothing is subtracted from itself as infinity."""


def chunks_of(head_dim: int) -> int:
    """Chunks of the words of a row: 64 words each, which the 64 rows of a product want, or all of a shorter row's."""
    return max(1, head_dim // 128)


@triton.constexpr_function
def set_columns(columns, index):
    """Columns of set `index`: powers of two from the largest, as 32 and 16 of 48; 0 for no such set."""
    for _ in range(index):
        columns -= 1 << columns.bit_length() - 1 if columns else 0
    return 1 << columns.bit_length() - 1 if columns else 0


@triton.constexpr_function
def sets_of(columns):
    """Sets of `columns`."""
    return columns.bit_count()


@triton.constexpr_function
def set_start(columns, index):
    """First column of set `index`."""
    return sum(1 << bit for bit in sorted((b for b in range(12) if columns >> b & 1), reverse=True)[:index])


@triton.jit
def _halves(w, FP8: tl.constexpr, ASM: tl.constexpr):
    if FP8:
        even, odd = fp8_halves(w, ASM)
    else:
        even, odd = int8_halves(w, True, ASM)
    return even, odd


@triton.jit
def _query_parts(
    query, q_token, q_head, rows, kv_head,
    Q_TOKENS: tl.constexpr, GROUP: tl.constexpr, WORDS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """fp32 [WORDS, N] of a set of rows [N]: even and odd elements of each chunk; zeros where rows lie beyond."""
    live = rows < Q_TOKENS * GROUP
    row_at = rows // GROUP * q_token + (kv_head * GROUP + rows % GROUP) * q_head
    at = row_at[None, :] + 2 * tl.arange(0, WORDS)[:, None]
    parts = ()
    for part in tl.static_range(2 * CHUNKS):
        x = tl.load(query + at + part // 2 * (2 * WORDS) + part % 2, mask=live[None, :], other=0.0).to(tl.float32)
        parts += (x,)
    return parts


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
def _fold(x):
    """Weights [TILE, COLUMNS] summed over tokens t and t + 8 of each 16, which one thread holds."""
    return tl.sum(x.reshape(x.shape[0] // 16, 2, 8, x.shape[1]), axis=1)


@triton.jit
def _words(at, inside, first, WORDS: tl.constexpr, AXIS: tl.constexpr, MASKED: tl.constexpr, EVICT: tl.constexpr):
    """Words `first` and after of rows at pointers, along AXIS; zeros where rows are not inside."""
    at += tl.expand_dims(first + tl.arange(0, WORDS), 1 - AXIS)
    return tl.load(at, mask=tl.expand_dims(inside, AXIS), other=0) if MASKED else tl.load(at, eviction_policy=EVICT)


@triton.jit
def _tile_step(  # noqa: C901, PLR0912
    kp, vp, inside, k_scale, v_scale, token, factor, constants, runnings,
    WORDS: tl.constexpr, CHUNKS: tl.constexpr, FP8: tl.constexpr, PER_TOKEN: tl.constexpr, MASKED: tl.constexpr,
    EVICT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """One tile: rows of words at kp [TILE, 1] and vp [1, TILE], scales [TILE]; the running parts after it.

    Several sets leave no registers for the words of V during the softmax: they are loaded where they are used.
    """
    SETS: tl.constexpr = len(constants)
    SOON: tl.constexpr = SETS == 1
    vw = ()
    if SOON:
        for c in tl.static_range(CHUNKS):
            vw += (_words(vp, inside, c * WORDS, WORDS, 0, MASKED, EVICT),)
    scores = ()
    for i in tl.static_range(SETS):
        scores += (tl.zeros([token.shape[0], constants[i][1].shape[0]], tl.float32),)
    for c in tl.static_range(CHUNKS):
        w = _words(kp, inside, c * WORDS, WORDS, 1, MASKED, EVICT)
        ke, ko = _halves(w, FP8, ASM)
        added = ()
        for i in tl.static_range(SETS):
            s = tl.dot(ke, constants[i][0][2 * c], scores[i])
            added += (tl.dot(ko, constants[i][0][2 * c + 1], s),)
        scores = added
    v_log, v_inverse = 0.0, 0.0
    if PER_TOKEN:
        v_log = log2(tl.where(v_scale < 1e-30, 1e-30, v_scale), ASM)  # NaN stays
        v_inverse = exp2(-v_log, ASM)
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
        sums += ((new, mass * decay[None, None, :] + _fold(weight)),)
    outputs = ()
    for c in tl.static_range(CHUNKS):
        w = vw[c] if SOON else _words(vp, inside, c * WORDS, WORDS, 0, MASKED, EVICT)
        ve, vo = _halves(w, FP8, ASM)
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


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=["lengths"])
def attend_columns(  # noqa: C901
    query, keys, values, key_scale, value_scale, table, lengths, partial, statistics, softmax_scale,
    q_batch, q_token, q_head, table_batch, splits,
    K_PAGE: tl.constexpr, K_HEAD: tl.constexpr, K_TOKEN: tl.constexpr,
    V_PAGE: tl.constexpr, V_HEAD: tl.constexpr, V_TOKEN: tl.constexpr,
    S_PAGE: tl.constexpr, S_HEAD: tl.constexpr, S_TOKEN: tl.constexpr,
    ALIGN: tl.constexpr, PAGE: tl.constexpr, Q_TOKENS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr, FP8: tl.constexpr, PER_TOKEN: tl.constexpr,
    CHUNKS: tl.constexpr, ASM: tl.constexpr, STAGES: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """Arguments as of `_attend_scaled`; a block of programs takes COLUMNS query rows, words come in CHUNKS."""
    block = tl.program_id(0)
    split = tl.program_id(1)
    batch = tl.program_id(2)
    kv_head = block % (HEADS // GROUP)
    first_row = block // (HEADS // GROUP) * COLUMNS
    WORDS: tl.constexpr = DIM // 2 // CHUNKS
    lane = tl.arange(0, TILE)
    length = tl.load(lengths + batch)
    big = 0.0
    queries = ()
    for i in tl.static_range(sets_of(COLUMNS)):
        parts = _query_parts(
            query + batch * q_batch, q_token, q_head,
            first_row + set_start(COLUMNS, i) + tl.arange(0, set_columns(COLUMNS, i)), kv_head, Q_TOKENS, GROUP, WORDS,
            CHUNKS,
        )  # fmt: skip
        big = _unit(parts, big)
        queries += (parts,)
    power = power_below(big) * 2.0**-14  # the largest is below 2^15: 40 bits down to the least that is not lost
    factor = power * softmax_scale
    if not PER_TOKEN:
        factor *= tl.load(key_scale)
    constants = ()
    runnings = ()
    for i in tl.static_range(sets_of(COLUMNS)):
        rows = first_row + set_start(COLUMNS, i) + tl.arange(0, set_columns(COLUMNS, i))
        constants += ((_narrow(queries[i], power), length - Q_TOKENS + rows // GROUP + 1),)
        runnings += (_nothing_seen(set_columns(COLUMNS, i), WORDS, CHUNKS, TILE),)
    first, last = tiles_of_split(length, split, splits, TILE)
    whole = tl.minimum(tl.maximum(length - Q_TOKENS + 1, 0) // TILE, last)  # tiles before it: every row sees all of it
    keys = tl.multiple_of(keys + kv_head * K_HEAD, ALIGN)
    values = tl.multiple_of(values + kv_head * V_HEAD, ALIGN)
    key_scale += kv_head * S_HEAD
    value_scale += kv_head * S_HEAD
    table += batch * table_batch
    for tile in tl.range(first, whole, num_stages=STAGES):
        start = tile * TILE
        ks, vs = 0.0, 0.0
        page = page_of_tile(table, start, lane, length, PAGE, TILE, ASM)
        if PAGE % TILE == 0:
            kp = keys + page * K_PAGE + start % PAGE * K_TOKEN + (lane * K_TOKEN)[:, None]
            vp = values + page * V_PAGE + start % PAGE * V_TOKEN + (lane * V_TOKEN)[None, :]
            sp = page * S_PAGE + start % PAGE * S_TOKEN + lane * S_TOKEN
        else:
            row = (start + lane) % PAGE
            kp = keys + (page * K_PAGE + row * K_TOKEN)[:, None]
            vp = values + (page * V_PAGE + row * V_TOKEN)[None, :]
            sp = page * S_PAGE + row * S_TOKEN
        if PER_TOKEN:
            ks = tl.load(key_scale + sp)
            vs = tl.load(value_scale + sp)
        runnings = _tile_step(
            kp, vp, None, ks, vs, lane, factor, constants, runnings, WORDS, CHUNKS, FP8, PER_TOKEN, False, EVICT, ASM
        )
    for tile in tl.range(tl.maximum(first, whole), last, num_stages=1):
        start = tile * TILE
        inside = start + lane < length
        row = start % PAGE + lane if PAGE % TILE == 0 else (start + lane) % PAGE
        page = page_of_tile(table, start, lane, length, PAGE, TILE)
        kp = keys + (page * K_PAGE + row * K_TOKEN)[:, None]
        vp = values + (page * V_PAGE + row * V_TOKEN)[None, :]
        ks, vs = 0.0, 0.0
        if PER_TOKEN:
            ks = tl.load(key_scale + page * S_PAGE + row * S_TOKEN, mask=inside, other=0.0)
            vs = tl.load(value_scale + page * S_PAGE + row * S_TOKEN, mask=inside, other=1.0)
        runnings = _tile_step(
            kp, vp, inside, ks, vs, start + lane, factor, constants, runnings, WORDS, CHUNKS, FP8, PER_TOKEN, True,
            EVICT, ASM,
        )  # fmt: skip
    unit = 1.0
    if not PER_TOKEN:
        unit = tl.load(value_scale)
    for i in tl.static_range(sets_of(COLUMNS)):
        top, mass, outputs = runnings[i]
        top = tl.where(top == FLOOR, float("-inf"), top)
        mass = tl.sum(tl.sum(mass, axis=0), axis=0)
        rows = first_row + set_start(COLUMNS, i) + tl.arange(0, set_columns(COLUMNS, i))
        for c in tl.static_range(CHUNKS):
            o = tl.interleave(tl.trans(outputs[2 * c]), tl.trans(outputs[2 * c + 1])) * unit
            store_part(
                partial, statistics, o, top, mass, batch, split, kv_head, rows,
                c * (2 * WORDS) + tl.arange(0, 2 * WORDS), Q_TOKENS, HEADS, GROUP, splits, DIM,
            )  # fmt: skip
