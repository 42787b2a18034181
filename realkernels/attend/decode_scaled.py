"""Fused decode attention over 8-bit caches: int8 with a scale per token and head, fp8 with such scales or one a tensor.

K scales multiply scores, V scales join the exponent (p v_scale = 2^(s + log2 v_scale - top), divided out of the sum of
p), so that no element is multiplied. Products are fp16 with fp32 sums (see `words.py`); int8 codes of K enter as
(code + 128) 2^-24, whose constant part leaves the scores through the query's sum, those of V exactly. The query is
scaled by a power of two per row, so that no query overflows fp16. A converted tile serves all row sets of a program.
"""

from typing import Literal

import torch
import triton
import triton.language as tl

from realkernels.attend.decode_scaled_wide import attend_columns, chunks_of
from realkernels.attend.merge import merge
from realkernels.attend.plan import (
    PROLOGUE_TILES,
    TilePlan,
    alignment,
    checked_call,
    is_large,
    multiplies_registers,
    tile_tokens,
)
from realkernels.attend.splits import Workspace, store_part, tiles_of_split
from realkernels.attend.tiles import exp2, log2, page_of_tile, row_maxima
from realkernels.attend.words import fp8_halves, int8_halves

LOG2E = 1.4426950408889634
Kind = Literal["int8", "fp8"]
ONE_ROUND = 40
"""Prologue of programs that only read: second rounds have made 12 sequences 12 to 25 % slower on an H200."""

ACROSS_DIM = 256
"""Elements of a head at which rows have been measured as columns."""


@triton.jit
def _load_half(query, row_at, live, offset: tl.constexpr, HALF: tl.constexpr):
    at = row_at[:, None] + 2 * tl.arange(0, HALF)[None, :] + offset
    return tl.load(query + at, mask=live[:, None], other=0.0).to(tl.float32)


@triton.jit
def _row_set(
    query, q_token, q_head, key_scale, softmax_scale, length, first_row, kv_head,
    Q_TOKENS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr,
    FP8: tl.constexpr, PER_TOKEN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Constant and running parts of a set of rows; scores are dot products x factor - shift."""
    rows = first_row + tl.arange(0, ROWS)
    live = rows < Q_TOKENS * GROUP
    row_at = rows // GROUP * q_token + (kv_head * GROUP + rows % GROUP) * q_head
    qe = _load_half(query, row_at, live, 0, HALF)
    qo = _load_half(query, row_at, live, 1, HALF)
    big = tl.maximum(tl.max(tl.abs(qe), axis=1), tl.max(tl.abs(qo), axis=1))
    power = tl.where(big < 1e-30, 1.0, (big.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True))
    qe = (qe / power[:, None]).to(tl.float16)  # below 2, and as exact as before
    qo = (qo / power[:, None]).to(tl.float16)
    factor = power * softmax_scale
    shift = (tl.sum(qe.to(tl.float32), axis=1) + tl.sum(qo.to(tl.float32), axis=1)) * 128.0 * factor
    if not PER_TOKEN:
        factor *= tl.load(key_scale)
    if not FP8:
        factor *= 16777216.0
    seen = length - Q_TOKENS + rows // GROUP + 1
    top = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS, TILE] if WIDE else [ROWS], tl.float32)
    o = tl.zeros([ROWS, HALF], tl.float32)
    return (qe, qo, factor, shift, seen), (top, mass, o, o)


@triton.jit
def _scores(constant, ke, ko, token, k_scale, v_log, FP8: tl.constexpr, PER_TOKEN: tl.constexpr, MASKED: tl.constexpr):
    """Scores [ROWS, TILE] of one set of rows in base 2, log2 of the V scale added."""
    qe, qo, factor, shift, seen = constant
    s = tl.dot(qe, tl.trans(ke))
    s = tl.dot(qo, tl.trans(ko), s)
    s = s * factor[:, None] if FP8 else s * factor[:, None] - shift[:, None]
    if PER_TOKEN:
        s = s * k_scale[None, :] + v_log[None, :]
    if MASKED:
        s = tl.where(token[None, :] < seen[:, None], s, float("-inf"))
    return s


@triton.jit
def _weigh(
    s, best, running, token, seen, v_inverse,
    PER_TOKEN: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Weights fp16 [ROWS, TILE] of a tile for one set of rows, and its running parts without the tile's values."""
    top, mass, oe, oo = running
    new = tl.maximum(top, best)
    base = tl.where(new == float("-inf"), 0.0, new)
    p = exp2(s - base[:, None], ASM)
    decay = exp2(top - base, ASM)
    weight = p
    if PER_TOKEN:
        weight = p * v_inverse[None, :]
    if MASKED:
        weight = tl.where(token[None, :] < seen[:, None], weight, 0.0)
    mass = mass * decay[:, None] + weight if WIDE else mass * decay + tl.sum(weight, axis=1)
    return p.to(tl.float16), (new, mass, oe * decay[:, None], oo * decay[:, None])


@triton.jit
def _tile_step(
    kw, vw, k_scale, v_scale, token, constants, runnings,
    SETS: tl.constexpr, FP8: tl.constexpr, PER_TOKEN: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """One tile for all sets of rows: words kw and vw [TILE, DIM / 2], scales [TILE]; the running parts after it."""
    v_log, v_inverse = 0.0, 0.0
    if PER_TOKEN:
        v_log = log2(tl.where(v_scale < 1e-30, 1e-30, v_scale), ASM)  # NaN stays
        v_inverse = exp2(-v_log, ASM)
    if FP8:
        ke, ko = fp8_halves(kw, ASM)
    else:
        ke, ko = int8_halves(kw, False, ASM)
    scores = ()
    for i in tl.static_range(SETS):
        scores += (_scores(constants[i], ke, ko, token, k_scale, v_log, FP8, PER_TOKEN, MASKED),)
    tops = row_maxima(scores, SETS)
    weighed = ()
    for i in tl.static_range(SETS):
        weighed += (
            _weigh(scores[i], tops[i], runnings[i], token, constants[i][4], v_inverse, PER_TOKEN, MASKED, WIDE, ASM),
        )
    if FP8:
        ve, vo = fp8_halves(vw, ASM)
    else:
        ve, vo = int8_halves(vw, True, ASM)
    after = ()
    for i in tl.static_range(SETS):
        p, running = weighed[i]
        top, mass, oe, oo = running
        after += ((top, mass, tl.dot(p, ve, oe), tl.dot(p, vo, oo)),)
    return after


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=["lengths"])
def _attend_scaled(  # noqa: C901
    query, keys, values, key_scale, value_scale, table, lengths, partial, statistics, softmax_scale,
    q_batch, q_token, q_head, table_batch, splits,
    K_PAGE: tl.constexpr, K_HEAD: tl.constexpr, K_TOKEN: tl.constexpr,
    V_PAGE: tl.constexpr, V_HEAD: tl.constexpr, V_TOKEN: tl.constexpr,
    S_PAGE: tl.constexpr, S_HEAD: tl.constexpr, S_TOKEN: tl.constexpr,
    ALIGN: tl.constexpr, PAGE: tl.constexpr, Q_TOKENS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    DIM: tl.constexpr, ROWS: tl.constexpr, SETS: tl.constexpr, TILE: tl.constexpr, FP8: tl.constexpr,
    PER_TOKEN: tl.constexpr, ASM: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    split = tl.program_id(1)
    batch = tl.program_id(2)
    kv_head = block % (HEADS // GROUP)
    first_row = block // (HEADS // GROUP) * (ROWS * SETS)
    HALF: tl.constexpr = DIM // 2
    half = tl.arange(0, HALF)
    lane = tl.arange(0, TILE)
    length = tl.load(lengths + batch)
    constants = ()
    runnings = ()
    for i in tl.static_range(SETS):
        constant, running = _row_set(
            query + batch * q_batch, q_token, q_head, key_scale, softmax_scale, length, first_row + i * ROWS, kv_head,
            Q_TOKENS, GROUP, ROWS, HALF, TILE, FP8, PER_TOKEN, WIDE,
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
    for tile in tl.range(first, whole, num_stages=STAGES):
        start = tile * TILE
        ks, vs = 0.0, 0.0
        page = page_of_tile(table, start, lane, length, PAGE, TILE, ASM)
        if PAGE % TILE == 0:
            kp = keys + page * K_PAGE + start % PAGE * K_TOKEN
            vp = values + page * V_PAGE + start % PAGE * V_TOKEN
            sp = page * S_PAGE + start % PAGE * S_TOKEN
            kw = tl.load(kp + (lane * K_TOKEN)[:, None] + half[None, :], eviction_policy=EVICT)
            vw = tl.load(vp + (lane * V_TOKEN)[:, None] + half[None, :], eviction_policy=EVICT)
            if PER_TOKEN:
                ks = tl.load(key_scale + sp + lane * S_TOKEN)
                vs = tl.load(value_scale + sp + lane * S_TOKEN)
        else:
            row = (start + lane) % PAGE
            kw = tl.load(keys + (page * K_PAGE + row * K_TOKEN)[:, None] + half[None, :], eviction_policy=EVICT)
            vw = tl.load(values + (page * V_PAGE + row * V_TOKEN)[:, None] + half[None, :], eviction_policy=EVICT)
            if PER_TOKEN:
                ks = tl.load(key_scale + page * S_PAGE + row * S_TOKEN)
                vs = tl.load(value_scale + page * S_PAGE + row * S_TOKEN)
        runnings = _tile_step(kw, vw, ks, vs, lane, constants, runnings, SETS, FP8, PER_TOKEN, False, WIDE, ASM)
    for tile in tl.range(tl.maximum(first, whole), last, num_stages=1):
        start = tile * TILE
        inside = start + lane < length
        row = start % PAGE + lane if PAGE % TILE == 0 else (start + lane) % PAGE
        pages = page_of_tile(table, start, lane, length, PAGE, TILE)
        ks, vs = 0.0, 0.0
        kp = pages * K_PAGE + row * K_TOKEN
        kw = tl.load(keys + kp[:, None] + half[None, :], mask=inside[:, None], other=0)
        vp = pages * V_PAGE + row * V_TOKEN
        if PER_TOKEN:
            ks = tl.load(key_scale + pages * S_PAGE + row * S_TOKEN, mask=inside, other=0.0)
            vs = tl.load(value_scale + pages * S_PAGE + row * S_TOKEN, mask=inside, other=1.0)
        vw = tl.load(values + vp[:, None] + half[None, :], mask=inside[:, None], other=0)
        token = start + lane
        runnings = _tile_step(kw, vw, ks, vs, token, constants, runnings, SETS, FP8, PER_TOKEN, True, WIDE, ASM)
    for i in tl.static_range(SETS):
        top, mass, oe, oo = runnings[i]
        if WIDE:
            mass = tl.sum(mass, axis=1)
        o = tl.interleave(oe, oo)
        if not PER_TOKEN:
            o *= tl.load(value_scale)
        store_part(
            partial, statistics, o, top, mass, batch, split, kv_head, first_row + i * ROWS + tl.arange(0, ROWS),
            tl.arange(0, DIM), Q_TOKENS, HEADS, GROUP, splits, DIM,
        )  # fmt: skip


def plan_scaled(
    *, query_rows: int, head_dim: int, device: torch.device, aligned: int = 16, per_token: bool = True
) -> TilePlan:
    """The fastest plan measured on an H200 (head_dim 256); it fits where shared memory is 100 KiB, too.

    `query_rows` is query tokens x query heads of a KV head; more than 48 are cut into blocks that read and convert a
    tile each. `aligned` is the planes' `alignment`: copies of 4 and 8 bytes want registers for their addresses. Of
    Hopper's matrix units rows that are columns (`decode_scaled_wide.py`) make more: 32 of them, and 48 where no scales
    per token take the registers.
    """
    blocks = -(-query_rows // 48)
    rows, sets = {1: (16, 1), 2: (32, 1), 3: (16, 3)}[-(-query_rows // (16 * blocks))]
    across = aligned == 16 and head_dim == ACROSS_DIM and multiplies_registers(device) and rows * sets > 16
    if across and sets > 1:
        across = not per_token
        rows, sets = (48, 1) if across else (rows, sets)
    return TilePlan(
        tile=tile_tokens(head_dim, of_256=64), rows=rows, sets=sets, num_warps=4, stages=3 if aligned == 16 else 2,
        per_multiprocessor=2 if is_large(device) else 1, wide=True, across=across,
        prologue_tiles=ONE_ROUND if rows * sets == 16 else PROLOGUE_TILES,
    )  # fmt: skip


def attend_scaled(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, key_scale: torch.Tensor, value_scale: torch.Tensor,
    page_table: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor, workspace: Workspace, *, kind: Kind,
    softmax_scale: float, plan: TilePlan | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attention of the newest q_tokens tokens of each sequence over 8-bit codes, into `out`.

    query and out [batch, q_tokens, query_heads, head_dim]; keys and values uint8 [pages, kv_heads, page_tokens,
    head_dim] with any even strides (4 bytes and more let loads be asynchronous); key_scale and value_scale fp32,
    [pages, kv_heads, page_tokens] with equal strides, or [1] for a tensor as a whole (fp8 only). Scales are positive.
    page_table int32 [batch, max_pages], lengths int32 [batch], new tokens included. Query i of q sees the first
    lengths - q + i + 1 tokens; one that sees none gets zeros. `workspace` comes from the plan (`plan_scaled` where none
    is given). Two launches, no host synchronisation; page numbers and lengths are trusted.
    """
    words_k, words_v = keys.view(torch.int16), values.view(torch.int16)
    call = checked_call(query, words_k, words_v, page_table, lengths, out, workspace, width=query.shape[3] // 2)
    per_token = key_scale.dim() == 3
    aligned = alignment(words_k, words_v)
    if plan is None:
        plan = plan_scaled(
            query_rows=call.query_rows, head_dim=call.head_dim, device=query.device, aligned=aligned,
            per_token=per_token,
        )  # fmt: skip
    if kind == "int8" and not per_token:
        raise ValueError("int8 caches have a scale per token and head")
    if per_token and (key_scale.stride() != value_scale.stride() or key_scale.shape != keys.shape[:3]):
        raise ValueError(f"scales {tuple(key_scale.shape)} {key_scale.stride()} and {value_scale.stride()}")
    if kind == "fp8" and query.device.type == "cuda" and torch.cuda.get_device_capability(query.device) < (8, 9):
        raise ValueError("fp8 caches need compute capability 8.9 or later")
    s_page, s_head, s_token = key_scale.stride() if per_token else (0, 0, 0)
    if plan.across:
        kernel, form = attend_columns, {"COLUMNS": plan.rows, "CHUNKS": chunks_of(call.head_dim)}
    else:
        kernel, form = _attend_scaled, {"ROWS": plan.rows, "SETS": plan.sets, "WIDE": plan.wide}
    kernel[(call.kv_heads * plan.blocks(call.query_rows), workspace.splits, call.batch)](
        query, words_k, words_v, key_scale, value_scale, page_table, lengths, workspace.partial, workspace.statistics,
        softmax_scale * LOG2E, query.stride(0), query.stride(1), query.stride(2), page_table.stride(0),
        workspace.splits,
        K_PAGE=words_k.stride(0), K_HEAD=words_k.stride(1), K_TOKEN=words_k.stride(2),
        V_PAGE=words_v.stride(0), V_HEAD=words_v.stride(1), V_TOKEN=words_v.stride(2),
        S_PAGE=s_page, S_HEAD=s_head, S_TOKEN=s_token,
        ALIGN=aligned, PAGE=call.page_tokens, Q_TOKENS=call.q_tokens, HEADS=call.query_heads,
        GROUP=call.group, DIM=call.head_dim, TILE=plan.tile, FP8=kind == "fp8", PER_TOKEN=per_token,
        ASM=query.device.type == "cuda", STAGES=plan.stages, EVICT=plan.evict, num_warps=plan.num_warps, **form,
    )  # fmt: skip
    return merge(workspace, out)
