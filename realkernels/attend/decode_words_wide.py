"""The kernel for caches of 16-bit words of codes under many query rows: several new tokens, or many heads a KV head.

As `decode_words.py`, with two differences: a tile is taken apart once for up to 64 rows (`wide_tiles.py`), and outputs
are rescaled only where scores pass what weights are relative to by more than a few powers of two: an exact choice,
since everything a row has summed is relative to one number.
"""

import triton
import triton.language as tl

from realkernels.attend.columns import largest, power_below, read_page
from realkernels.attend.nibbles import tiny_unit
from realkernels.attend.splits import store_part, tiles_of_split
from realkernels.attend.wide_tiles import set_count, set_first, set_width, wide_step
from realkernels.attend.word_tiles import GROUPS, INT4, QUERY_TOP, TURBOQUANT, element, query_unit


@triton.jit
def _row_numbers(block, index: tl.constexpr, ROWS: tl.constexpr):
    """Numbers of a set's query rows within Q_TOKENS x GROUP; some may lie beyond."""
    return block * ROWS + set_first(ROWS, index) + tl.arange(0, set_width(ROWS, index))


@triton.jit
def _query_part(
    query, element, rows, batch, kv_head, q_batch, q_token, q_head, Q_TOKENS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """fp32 [ELEMENTS, N]: these elements of the rows of a set, zeros where rows lie beyond."""
    at = batch * q_batch + rows // GROUP * q_token + (kv_head * GROUP + rows % GROUP) * q_head
    live = (rows < Q_TOKENS * GROUP)[None, :]
    return tl.load(query + at[None, :] + element[:, None], mask=live, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["splits"])
def attend_words_wide(  # noqa: C901, PLR0912
    query, keys, values, key_scale, value_scale, value_zero, table, lengths, partial, statistics, softmax_scale, v_unit,
    q_batch, q_token, q_head, table_batch, splits,
    K_PAGE: tl.constexpr, K_HEAD: tl.constexpr, K_TOKEN: tl.constexpr, K_GROUP: tl.constexpr,
    V_PAGE: tl.constexpr, V_HEAD: tl.constexpr, V_TOKEN: tl.constexpr, V_GROUP: tl.constexpr,
    S_PAGE: tl.constexpr, S_HEAD: tl.constexpr, S_TOKEN: tl.constexpr, S_GROUP: tl.constexpr,
    FORMAT: tl.constexpr, KW: tl.constexpr, KZ: tl.constexpr, KF: tl.constexpr, VW: tl.constexpr, VZ: tl.constexpr,
    VF: tl.constexpr, GGML: tl.constexpr, PAIRS: tl.constexpr, ALIGN: tl.constexpr, PAGE: tl.constexpr,
    Q_TOKENS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, WARPS: tl.constexpr, ASM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One split of one sequence and KV head; see `launch_words.py` for the arguments."""
    SETS: tl.constexpr = set_count(ROWS)
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
    big = 0.0
    for i in tl.static_range(SETS):
        for number in tl.static_range(KW):
            part = _query_part(
                query, element(k_word, number, KW, GGML), _row_numbers(block, i, ROWS), batch, kv_head, q_batch,
                q_token, q_head, Q_TOKENS, GROUP,
            )  # fmt: skip
            big = tl.maximum(big, largest(part))
    power = power_below(big) / QUERY_TOP
    factor = power * softmax_scale
    constants = ()
    state = ()
    outputs = ()
    for i in tl.static_range(SETS):
        rows = _row_numbers(block, i, ROWS)
        q = ()
        total = tl.zeros([set_width(ROWS, i)], tl.float32)
        for number in tl.static_range(KW):
            part = _query_part(
                query, element(k_word, number, KW, GGML), rows, batch, kv_head, q_batch, q_token, q_head, Q_TOKENS,
                GROUP,
            )  # fmt: skip
            part = (part * (query_unit(number, FORMAT) / power)).to(tl.float16)
            total += tl.sum(part.to(tl.float32), axis=0) / (query_unit(number, FORMAT) * tiny_unit(0, 4))
            q += (part,)
        constants += ((q, total, length - Q_TOKENS + rows // GROUP + 1),)
        none = tl.zeros([WARPS, 8, set_width(ROWS, i)], tl.float32)
        state += ((tl.zeros([set_width(ROWS, i)], tl.float32), none, none),)
    for _number in tl.static_range(VW):
        o = ()
        for i in tl.static_range(SETS):
            o += (tl.zeros([DIM // VW, set_width(ROWS, i)], tl.float32),)
        outputs += (o,)
    if FORMAT == INT4:
        factor *= tiny_unit(0, 4)
    k_column = k_word if K_GROUP == 32 // KW else k_word // (32 // KW) * K_GROUP + k_word % (32 // KW)
    v_column = v_word if V_GROUP == 32 // VW else v_word // (32 // VW) * V_GROUP + v_word % (32 // VW)
    k_at = tl.multiple_of(keys + kv_head * K_HEAD, ALIGN) + (lane * K_TOKEN)[:, None] + k_column[None, :]
    v_at = tl.multiple_of(values + kv_head * V_HEAD, ALIGN) + (lane * V_TOKEN)[None, :] + v_column[:, None]
    ONE: tl.constexpr = 2 if PAIRS else 1  # tokens that an element of the scales holds
    s_at = kv_head * (S_HEAD // ONE) + lane // ONE * S_TOKEN
    t_at = s_at
    if FORMAT == GROUPS:
        group = tl.arange(0, DIM // 32) * S_GROUP
        t_at = s_at[None, :] + group[:, None]
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
        state, outputs = wide_step(
            kw, vw, ks, vs, vz, None, constants, state, outputs, factor, tile == first,
            FORMAT, KW, KZ, KF, VW, VZ, VF, PAIRS, ROWS, False, WARPS, ASM,
        )  # fmt: skip
    for tile in tl.range(tl.maximum(first, whole), last, num_stages=1):
        row = tile * TILE % PAGE
        token = tile * TILE + lane
        inside = token < length
        s_inside, t_inside = inside, inside
        if FORMAT == GROUPS:
            s_inside, t_inside = s_inside[:, None], s_inside[None, :]
        page = tl.load(table + tile * TILE // PAGE).to(tl.int64)
        s_row = page * (S_PAGE // ONE) + row // ONE * S_TOKEN
        kw = tl.load(k_at + (page * K_PAGE + row * K_TOKEN), mask=inside[:, None], other=0)
        ks = tl.load(key_scale + s_at + s_row, mask=s_inside, other=0)
        vw = tl.load(v_at + (page * V_PAGE + row * V_TOKEN), mask=inside[None, :], other=0)
        vs = tl.load(value_scale + t_at + s_row, mask=t_inside, other=0)
        vz = vs
        if FORMAT == TURBOQUANT:
            vz = tl.load(value_zero + t_at + s_row, mask=t_inside, other=0)
        state, outputs = wide_step(
            kw, vw, ks, vs, vz, token, constants, state, outputs, factor, tile == first,
            FORMAT, KW, KZ, KF, VW, VZ, VF, PAIRS, ROWS, True, WARPS, ASM,
        )  # fmt: skip
    for i in tl.static_range(SETS):
        rows = _row_numbers(block, i, ROWS)
        top, mass, low = state[i]
        seen = length - Q_TOKENS + rows // GROUP + 1 > first * TILE
        top = tl.where(seen & (first < last), top, float("-inf"))
        mass, low = tl.sum(tl.sum(mass, axis=0), axis=0), tl.sum(tl.sum(low, axis=0), axis=0)[None, :]
        for number in tl.static_range(VW):
            o = outputs[number][i]
            if FORMAT == GROUPS:
                o *= v_unit
            elif FORMAT == INT4:
                o -= low
            else:
                o += low
            store_part(
                partial, statistics, tl.trans(o), top, mass, batch, split, kv_head, rows,
                number * (DIM // VW) + v_word, Q_TOKENS, HEADS, GROUP, splits, DIM,
            )  # fmt: skip
