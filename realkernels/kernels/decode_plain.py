"""Decode attention over bf16 and fp16 caches: split-KV, partial results combined by a second launch.

A tile of K and V is read once for all query heads of a KV head and all query tokens. Scores, maxima and sums are fp32;
the weights p are rounded to the cache's type for their product.
"""

from collections.abc import Mapping

import torch

from realkernels.jit import tl, triton
from realkernels.kernels.query_sets import softmax_set
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
    p, decay, top = softmax_set(s, top, tl.max(s, axis=1), 1, ASM)
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
    ASM: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
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
    for masked in tl.static_range(2):
        begin = tl.maximum(first, whole) if masked else first
        end = last if masked else whole
        for tile in tl.range(begin, end, num_stages=1 if masked else STAGES):
            start = tile * TILE
            page = page_of_tile(table, start, lane, length, PAGE, TILE, ASM and not masked)
            k_at = tile_rows(keys, page, start, lane, K_PAGE, K_TOKEN, PAGE, TILE, not masked, 1) + dims[None, :]
            k = load_rows(k_at, start + lane < length, masked, 1)
            v_at = tile_rows(values, page, start, lane, V_PAGE, V_TOKEN, PAGE, TILE, not masked, 1) + dims[None, :]
            v = load_rows(v_at, start + lane < length, masked, 1)
            visible = (start + lane)[None, :] < seen[:, None]
            top, mass, o = _tile_step(k, v, visible, q, top, mass, o, softmax_scale, masked, WIDE, ASM)
    if WIDE:
        mass = tl.sum(mass, axis=1)
    store_part(
        partial, statistics, o, top, mass, batch, split, kv_head, rows, dims, Q_TOKENS, HEADS, GROUP, splits, DIM
    )


def attend_plain(
    query: torch.Tensor, views: Mapping[str, torch.Tensor], page_table: torch.Tensor, lengths: torch.Tensor,
    out: torch.Tensor, workspace: Workspace, *, plan: TilePlan, softmax_scale: float,
) -> torch.Tensor:  # fmt: skip
    """`DecodeForm.attend`; views key_data and value_data bf16 or fp16 [pages, kv_heads, page_tokens, head_dim].

    Any strides that are multiples of 16 bytes.
    """
    keys, values = views["key_data"], views["value_data"]
    call = checked_call(query, keys, values, page_table, lengths, out, workspace, width=query.shape[3])
    if plan.sets != 1:
        raise ValueError(f"{plan.sets} sets of rows: this kernel takes one")
    if alignment(keys, values) < 16:
        raise ValueError("planes of bf16 and fp16 must be aligned to 16 bytes")
    _attend_plain[(call.kv_heads * plan.blocks(call.q_rows), workspace.splits, call.batch)](
        query, keys, values, page_table, lengths, workspace.partial, workspace.statistics, softmax_scale * LOG2E,
        query.stride(0), query.stride(1), query.stride(2), page_table.stride(0), workspace.splits,
        K_PAGE=keys.stride(0), K_HEAD=keys.stride(1), K_TOKEN=keys.stride(2),
        V_PAGE=values.stride(0), V_HEAD=values.stride(1), V_TOKEN=values.stride(2),
        PAGE=call.page_tokens, Q_TOKENS=call.q_tokens, HEADS=call.query_heads, GROUP=call.group,
        DIM=call.head_dim, ROWS=plan.rows, TILE=plan.tile,
        ASM=query.device.type == "cuda", WIDE=plan.wide, STAGES=plan.stages,
        num_warps=plan.num_warps,
    )  # fmt: skip
    return combine_splits(workspace, out)
