"""The kernel for caches whose rows are 16-bit words of two or four codes: int4, groups of 32, TurboQuant.

Products have queries as columns (`columns.py`). FORMAT says how numbers come from codes (`nibbles.py`) and where scales
go; see `decode_nibble.py`, `decode_groups.py` and `decode_turboquant.py`, which launch it. V scales per token join the
exponent: p v_scale = 2^(s + log2 v_scale - top) are the weights of the codes, the sum of p is taken from p v_scale /
v_scale, and what zeros add to all elements alike is summed apart.
"""

import triton
import triton.language as tl

from realkernels.attend.columns import (
    by_rows,
    largest,
    per_row,
    power_below,
    query_part,
    read_page,
    set_rows,
    store_set,
)
from realkernels.attend.nibbles import tiny_unit
from realkernels.attend.splits import tiles_of_split
from realkernels.attend.word_tiles import GROUPS, INT4, QUERY_TOP, TURBOQUANT, element, query_unit, tile_step


@triton.jit(do_not_specialize=["splits"])
def attend_words(  # noqa: C901, PLR0912
    query, keys, values, key_scale, value_scale, value_zero, table, lengths, partial, statistics, softmax_scale, v_unit,
    q_batch, q_token, q_head, table_batch, splits,
    K_PAGE: tl.constexpr, K_HEAD: tl.constexpr, K_TOKEN: tl.constexpr, K_GROUP: tl.constexpr,
    V_PAGE: tl.constexpr, V_HEAD: tl.constexpr, V_TOKEN: tl.constexpr, V_GROUP: tl.constexpr,
    S_PAGE: tl.constexpr, S_HEAD: tl.constexpr, S_TOKEN: tl.constexpr, S_GROUP: tl.constexpr,
    FORMAT: tl.constexpr, KW: tl.constexpr, KZ: tl.constexpr, KF: tl.constexpr, VW: tl.constexpr, VZ: tl.constexpr,
    VF: tl.constexpr, GGML: tl.constexpr, PAIRS: tl.constexpr, ALIGN: tl.constexpr, PAGE: tl.constexpr,
    Q_TOKENS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, SETS: tl.constexpr,
    TILE: tl.constexpr, KEEP: tl.constexpr, AXIS: tl.constexpr, ASM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One split of one sequence and KV head; see `launch_words.py` for the arguments."""
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
    parts = ()
    big = 0.0
    for i in tl.static_range(SETS):
        q = ()
        for number in tl.static_range(KW):
            part = query_part(
                query, element(k_word, number, KW, GGML), set_rows(block, i, SETS, AXIS), batch, kv_head,
                q_batch, q_token, q_head, Q_TOKENS, GROUP, AXIS,
            )  # fmt: skip
            big = tl.maximum(big, largest(part))
            q += (part,)
        parts += (q,)
    power = power_below(big) / QUERY_TOP
    factor = power * softmax_scale
    constants = ()
    sums = ()
    outputs = ()
    for i in tl.static_range(SETS):
        q = ()
        total = tl.zeros([8 + 8 * AXIS], tl.float32)
        for number in tl.static_range(KW):
            part = (parts[i][number] * (query_unit(number, FORMAT) / power)).to(tl.float16)
            total += tl.sum(part.to(tl.float32), axis=AXIS) / (query_unit(number, FORMAT) * tiny_unit(0, 4))
            q += (part,)
        constants += ((q, total, length - Q_TOKENS + set_rows(block, i, SETS, AXIS) // GROUP + 1),)
        top = tl.full([8 + 8 * AXIS], float("-inf"), tl.float32)
        sums += ((top, by_rows(KEEP, AXIS), by_rows(KEEP, AXIS)),)
    for _number in tl.static_range(VW):
        o = ()
        for _ in tl.static_range(SETS):
            o += (by_rows(DIM // VW, AXIS),)
        outputs += (o,)
    if FORMAT == INT4:
        factor *= tiny_unit(0, 4)
    k_column = k_word if K_GROUP == 32 // KW else k_word // (32 // KW) * K_GROUP + k_word % (32 // KW)
    v_column = v_word if V_GROUP == 32 // VW else v_word // (32 // VW) * V_GROUP + v_word % (32 // VW)
    k_at = tl.multiple_of(keys + kv_head * K_HEAD, ALIGN) + (lane * K_TOKEN)[:, None] + k_column[None, :]
    v_at = tl.multiple_of(values + kv_head * V_HEAD, ALIGN)
    v_at = v_at + tl.expand_dims(lane * V_TOKEN, AXIS) + tl.expand_dims(v_column, 1 - AXIS)
    ONE: tl.constexpr = 2 if PAIRS else 1  # tokens that an element of the scales holds
    s_at = kv_head * (S_HEAD // ONE) + lane // ONE * S_TOKEN
    t_at = s_at
    if FORMAT == GROUPS:
        group = tl.arange(0, DIM // 32) * S_GROUP
        t_at = tl.expand_dims(s_at, AXIS) + tl.expand_dims(group, 1 - AXIS)
        s_at = s_at[:, None] + group[None, :]
    for tile in tl.range(first, whole, num_stages=STAGES):
        following = read_page(table, tl.minimum(tile + 1, last - 1) * TILE // PAGE, ASM)
        row = tile * TILE % PAGE
        s_row = page * (S_PAGE // ONE) + row // ONE * S_TOKEN
        kw = tl.load(k_at + (page * K_PAGE + row * K_TOKEN))
        ks = tl.load(key_scale + s_at + s_row)
        vw = tl.load(v_at + (page * V_PAGE + row * V_TOKEN))
        vs = tl.load(value_scale + t_at + s_row)
        vz = vs
        if FORMAT == TURBOQUANT:
            vz = tl.load(value_zero + t_at + s_row)
        page = following
        sums, outputs = tile_step(
            kw, vw, ks, vs, vz, None, constants, sums, outputs, factor,
            FORMAT, KW, KZ, KF, VW, VZ, VF, PAIRS, SETS, False, KEEP, AXIS, ASM,
        )  # fmt: skip
    for tile in tl.range(tl.maximum(first, whole), last, num_stages=1):
        row = tile * TILE % PAGE
        token = tile * TILE + lane
        inside = token < length
        s_inside, t_inside = inside, inside
        if FORMAT == GROUPS:
            s_inside, t_inside = s_inside[:, None], tl.expand_dims(s_inside, AXIS)
        page = tl.load(table + tile * TILE // PAGE).to(tl.int64)
        s_row = page * (S_PAGE // ONE) + row // ONE * S_TOKEN
        kw = tl.load(k_at + (page * K_PAGE + row * K_TOKEN), mask=inside[:, None], other=0)
        ks = tl.load(key_scale + s_at + s_row, mask=s_inside, other=0)
        vw = tl.load(v_at + (page * V_PAGE + row * V_TOKEN), mask=tl.expand_dims(inside, AXIS), other=0)
        vs = tl.load(value_scale + t_at + s_row, mask=t_inside, other=0)
        vz = vs
        if FORMAT == TURBOQUANT:
            vz = tl.load(value_zero + t_at + s_row, mask=t_inside, other=0)
        sums, outputs = tile_step(
            kw, vw, ks, vs, vz, token, constants, sums, outputs, factor,
            FORMAT, KW, KZ, KF, VW, VZ, VF, PAIRS, SETS, True, KEEP, AXIS, ASM,
        )  # fmt: skip
    for i in tl.static_range(SETS):
        top, mass, low = sums[i]
        mass, low = tl.sum(mass, axis=AXIS), per_row(tl.sum(low, axis=AXIS), AXIS)
        for number in tl.static_range(VW):
            o = outputs[number][i]
            if FORMAT == GROUPS:
                o *= v_unit
            elif FORMAT == INT4:
                o -= low
            else:
                o += low
            store_set(
                partial, statistics, o, top, mass, batch, split, kv_head, set_rows(block, i, SETS, AXIS),
                number * (DIM // VW) + v_word, Q_TOKENS, HEADS, GROUP, splits, DIM, AXIS,
            )  # fmt: skip
