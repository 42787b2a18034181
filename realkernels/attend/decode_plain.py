"""Fused decode attention over bf16 and fp16 caches: split over the tokens, merged by a second launch.

A tile of K and V is read once for all query heads of a KV head and all query tokens. Scores, maxima and sums are fp32;
the weights p are rounded to the cache's type for their product.
"""

import torch
import triton
import triton.language as tl

from realkernels.attend.merge import merge
from realkernels.attend.plan import TilePlan, alignment, checked_call, is_large, tile_tokens
from realkernels.attend.splits import Workspace, store_part, tiles_of_split
from realkernels.attend.tiles import page_of_tile, softmax_step

LOG2E = 1.4426950408889634


@triton.jit
def _tile_step(
    k, v, visible, q, top, mass, o, softmax_scale,
    MASKED: tl.constexpr, WIDE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """One tile: k and v [TILE, DIM], q [ROWS, DIM], visible [ROWS, TILE]; top [ROWS], o [ROWS, DIM]."""
    if not ASM:  # the interpreter multiplies the raw bits of bf16
        k, v, q = k.to(tl.float32), v.to(tl.float32), q.to(tl.float32)
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * softmax_scale
    if MASKED:
        s = tl.where(visible, s, float("-inf"))
    p, decay, top = softmax_step(s, top, ASM)
    mass = mass * decay[:, None] + p if WIDE else mass * decay + tl.sum(p, axis=1)
    o = tl.dot(p.to(v.dtype), v, o * decay[:, None], input_precision="ieee")
    return top, mass, o


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=["lengths"])
def _attend_plain(
    query, keys, values, table, lengths, partial, statistics, softmax_scale,
    q_batch, q_token, q_head, table_batch, splits,
    K_PAGE: tl.constexpr, K_HEAD: tl.constexpr, K_TOKEN: tl.constexpr,
    V_PAGE: tl.constexpr, V_HEAD: tl.constexpr, V_TOKEN: tl.constexpr,
    PAGE: tl.constexpr, Q_TOKENS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    DIM: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    ASM: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    split = tl.program_id(1)
    batch = tl.program_id(2)
    kv_head = block % (HEADS // GROUP)
    rows = block // (HEADS // GROUP) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    lane = tl.arange(0, TILE)
    length = tl.load(lengths + batch)
    live = rows < Q_TOKENS * GROUP
    row_at = batch * q_batch + rows // GROUP * q_token + (kv_head * GROUP + rows % GROUP) * q_head
    q = tl.load(query + row_at[:, None] + dims[None, :], mask=live[:, None], other=0.0).to(keys.dtype.element_ty)
    seen = length - Q_TOKENS + rows // GROUP + 1
    first, last = tiles_of_split(length, split, splits, TILE)
    whole = tl.minimum(tl.maximum(length - Q_TOKENS + 1, 0) // TILE, last)  # tiles before it: every row sees all of it
    top = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS, TILE] if WIDE else [ROWS], tl.float32)
    o = tl.zeros([ROWS, DIM], tl.float32)
    keys += kv_head * K_HEAD
    values += kv_head * V_HEAD
    table += batch * table_batch
    for tile in tl.range(first, whole, num_stages=STAGES):
        start = tile * TILE
        page = page_of_tile(table, start, lane, length, PAGE, TILE, ASM)
        if PAGE % TILE == 0:
            kp = keys + page * K_PAGE + start % PAGE * K_TOKEN
            vp = values + page * V_PAGE + start % PAGE * V_TOKEN
            k = tl.load(kp + (lane * K_TOKEN)[:, None] + dims[None, :], eviction_policy=EVICT)
            v = tl.load(vp + (lane * V_TOKEN)[:, None] + dims[None, :], eviction_policy=EVICT)
        else:
            row = (start + lane) % PAGE
            k = tl.load(keys + (page * K_PAGE + row * K_TOKEN)[:, None] + dims[None, :], eviction_policy=EVICT)
            v = tl.load(values + (page * V_PAGE + row * V_TOKEN)[:, None] + dims[None, :], eviction_policy=EVICT)
        top, mass, o = _tile_step(k, v, None, q, top, mass, o, softmax_scale, False, WIDE, ASM)
    for tile in tl.range(tl.maximum(first, whole), last, num_stages=1):
        start = tile * TILE
        inside = start + lane < length
        row = start % PAGE + lane if PAGE % TILE == 0 else (start + lane) % PAGE
        pages = page_of_tile(table, start, lane, length, PAGE, TILE)
        kp = pages * K_PAGE + row * K_TOKEN
        k = tl.load(keys + kp[:, None] + dims[None, :], mask=inside[:, None], other=0.0)
        vp = pages * V_PAGE + row * V_TOKEN
        v = tl.load(values + vp[:, None] + dims[None, :], mask=inside[:, None], other=0.0)
        visible = (start + lane)[None, :] < seen[:, None]
        top, mass, o = _tile_step(k, v, visible, q, top, mass, o, softmax_scale, True, WIDE, ASM)
    if WIDE:
        mass = tl.sum(mass, axis=1)
    store_part(
        partial, statistics, o, top, mass, batch, split, kv_head, rows, dims, Q_TOKENS, HEADS, GROUP, splits, DIM
    )


def plan_plain(*, query_rows: int, head_dim: int, device: torch.device) -> TilePlan:
    """The fastest plan measured on an H200 (head_dim 256), and one that fits where shared memory is 100 KiB.

    `query_rows` is query tokens x query heads of a KV head; more than 64 are cut into blocks that read a tile each.
    """
    large = is_large(device)
    if query_rows <= 16:
        return TilePlan(
            tile=tile_tokens(head_dim, of_256=64), rows=16, num_warps=4, stages=3 if large else 2,
            per_multiprocessor=1, wide=True,
        )  # fmt: skip
    return TilePlan(
        tile=tile_tokens(head_dim, of_256=32), rows=64, num_warps=4, stages=3 if large else 2,
        per_multiprocessor=1, wide=False,
    )  # fmt: skip


def attend_plain(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, page_table: torch.Tensor, lengths: torch.Tensor,
    out: torch.Tensor, workspace: Workspace, *, softmax_scale: float, plan: TilePlan | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attention of the newest q_tokens tokens of each sequence, into `out`.

    query and out [batch, q_tokens, query_heads, head_dim]; keys and values bf16 or fp16
    [pages, kv_heads, page_tokens, head_dim] with any strides that are multiples of 16 bytes; page_table int32
    [batch, max_pages], lengths int32 [batch], new tokens included. Query i of q sees the first lengths - q + i + 1
    tokens; one that sees none gets zeros. `workspace` comes from the plan (`plan_plain` where none is given). Two
    launches, no host synchronisation; page numbers and lengths are trusted.
    """
    call = checked_call(query, keys, values, page_table, lengths, out, workspace, width=query.shape[3])
    if plan is None:
        plan = plan_plain(query_rows=call.query_rows, head_dim=call.head_dim, device=query.device)
    if plan.sets != 1:
        raise ValueError(f"{plan.sets} sets of rows: this kernel takes one")
    if alignment(keys, values) < 16:
        raise ValueError("planes of bf16 and fp16 must be aligned to 16 bytes")
    _attend_plain[(call.kv_heads * plan.blocks(call.query_rows), workspace.splits, call.batch)](
        query, keys, values, page_table, lengths, workspace.partial, workspace.statistics, softmax_scale * LOG2E,
        query.stride(0), query.stride(1), query.stride(2), page_table.stride(0), workspace.splits,
        K_PAGE=keys.stride(0), K_HEAD=keys.stride(1), K_TOKEN=keys.stride(2),
        V_PAGE=values.stride(0), V_HEAD=values.stride(1), V_TOKEN=values.stride(2),
        PAGE=call.page_tokens, Q_TOKENS=call.q_tokens, HEADS=call.query_heads, GROUP=call.group,
        DIM=call.head_dim, ROWS=plan.rows, TILE=plan.tile,
        ASM=query.device.type == "cuda", WIDE=plan.wide, STAGES=plan.stages, EVICT=plan.evict,
        num_warps=plan.num_warps,
    )  # fmt: skip
    return merge(workspace, out)
