"""Sparse decode attention over selected blocks: planes in VRAM or in mapped host memory, the same two kernels.

A program reads whole blocks, all KV heads of them: K of one block is one contiguous run of ratio x kv_heads x head_dim
elements, so that a link sees runs of 4 KiB. All loads of a program are issued before its first product; splits are
merged by a second kernel that rescales their running softmax.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from realkernels.kernels.pdl import launch_options, let_next_begin, wait_for_last
from realkernels.shape import QsaShape

LOG2E = 1.4426950408889634


@triton.jit
def _rows_of(selected, end, first, TOPK: tl.constexpr, RATIO: tl.constexpr, TILE: tl.constexpr):
    """Token of each of TILE lanes, and whether it exists: the selected blocks, then the open tail as one more block."""
    lane = tl.arange(0, TILE)
    slot = first + lane // RATIO
    block = tl.load(selected + slot, mask=slot < TOPK, other=0)
    token = tl.where(slot < TOPK, block, end // RATIO) * RATIO + lane % RATIO
    return token, (slot <= TOPK) & (token < end)


@triton.jit
def _attend_split(
    query, keys, values, selected, partial, statistics, end, scale,
    TOPK: tl.constexpr, RATIO: tl.constexpr, GROUP: tl.constexpr, PAD: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, TILE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)  # fastest: the halves of one block are asked for together
    split = tl.program_id(1)
    token, live = _rows_of(selected, end, split * (TILE // RATIO), TOPK, RATIO, TILE)
    dims = tl.arange(0, DIM)
    at = token.to(tl.int64)[:, None] * (KV_HEADS * DIM) + kv_head * DIM + dims[None, :]
    k = tl.load(keys + at, mask=live[:, None], other=0.0)  # [TILE, DIM]
    v = tl.load(values + at, mask=live[:, None], other=0.0)
    rows = tl.arange(0, PAD)
    own = rows < GROUP
    head = kv_head * GROUP + rows
    q = tl.load(query + head[:, None] * DIM + dims[None, :], mask=own[:, None], other=0.0)  # [PAD, DIM]
    if UPCAST:
        q, k, v = q.to(tl.float32), k.to(tl.float32), v.to(tl.float32)
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # [PAD, TILE], base 2
    s = tl.where(live[None, :], s, float("-inf"))
    top = tl.max(s, axis=1)
    p = tl.exp2(s - tl.where(top == float("-inf"), 0.0, top)[:, None])
    o = tl.dot(p.to(v.dtype), v, input_precision="ieee")  # [PAD, DIM]
    out = split * (KV_HEADS * GROUP) + head
    tl.store(partial + out[:, None] * DIM + dims[None, :], o, mask=own[:, None])
    tl.store(statistics + out * 2, top, mask=own)
    tl.store(statistics + out * 2 + 1, tl.sum(p, axis=1), mask=own)


@triton.jit
def _merge_splits(
    partial, statistics, output,
    SPLITS: tl.constexpr, SPLITS_PAD: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, PIECE: tl.constexpr,
    EARLY: tl.constexpr, FOLLOWED: tl.constexpr,
):  # fmt: skip
    let_next_begin(FOLLOWED)
    wait_for_last(EARLY)
    head = tl.program_id(0)
    dims = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    split = tl.arange(0, SPLITS_PAD)
    live = split < SPLITS
    row = split * HEADS + head
    top = tl.load(statistics + row * 2, mask=live, other=float("-inf"))
    mass = tl.load(statistics + row * 2 + 1, mask=live, other=0.0)
    o = tl.load(partial + row[:, None] * DIM + dims[None, :], mask=live[:, None], other=0.0)  # [SPLITS_PAD, PIECE]
    weight = tl.exp2(top - tl.max(top, axis=0))
    total = tl.sum(weight * mass, axis=0)
    merged = tl.sum(o * weight[:, None], axis=0) / total
    tl.store(output + head * DIM + dims, merged.to(output.dtype.element_ty))


@dataclass(frozen=True, kw_only=True)
class GatherPlan:
    """How one decode gather is cut: `blocks_per_split` selected blocks a program, of one KV head."""

    blocks_per_split: int = 8
    piece: int = 64
    """Output elements of one merging program."""
    num_warps: int = 4

    def splits(self, shape: QsaShape) -> int:
        """Programs along the selection; the open tail counts as one more block."""
        return -(-(shape.topk + 1) // self.blocks_per_split)


@dataclass(frozen=True, kw_only=True)
class GatherBuffers:
    """Partial results of one gather."""

    partial: torch.Tensor
    """float32 [splits, query_heads, head_dim]."""
    statistics: torch.Tensor
    """float32 [splits, query_heads, 2]: running maximum (base 2) and mass."""

    @staticmethod
    def allocate(shape: QsaShape, plan: GatherPlan, device: torch.device) -> "GatherBuffers":
        """Buffers on `device`."""
        splits = plan.splits(shape)
        return GatherBuffers(
            partial=torch.empty(splits, shape.query_heads, shape.head_dim, dtype=torch.float32, device=device),
            statistics=torch.empty(splits, shape.query_heads, 2, dtype=torch.float32, device=device),
        )


def gather_attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    selected: torch.Tensor,
    end: int,
    output: torch.Tensor,
    buffers: GatherBuffers,
    shape: QsaShape,
    plan: GatherPlan,
) -> None:
    """Attention of the token at position `end` - 1 over `selected` blocks and the tail, into `output`.

    query and output [query_heads, head_dim]; keys and values [tokens, kv_heads, head_dim], on the device or mapped host
    memory; selected int32 [topk], each below end // ratio (trusted: see `bounds.check_selected`). fp16 or bf16. A NaN
    in a selected row reaches the heads that share its KV head and nobody else; nothing else is read. Two launches,
    capturable in a CUDA graph.
    """
    if plan.blocks_per_split * shape.ratio < 16:
        raise ValueError(f"blocks_per_split {plan.blocks_per_split} makes tiles below 16 tokens")
    if end // shape.ratio < shape.topk:
        raise ValueError(f"a context of {end} tokens has fewer than {shape.topk} blocks: it is read whole")
    upcast = query.device.type == "cpu"  # the interpreter multiplies the raw bits of bf16
    splits = plan.splits(shape)
    _attend_split[(shape.kv_heads, splits)](
        query, keys, values, selected, buffers.partial, buffers.statistics, end, LOG2E * shape.head_dim**-0.5,
        TOPK=shape.topk, RATIO=shape.ratio, GROUP=shape.group, PAD=max(16, triton.next_power_of_2(shape.group)),
        KV_HEADS=shape.kv_heads, DIM=shape.head_dim, TILE=plan.blocks_per_split * shape.ratio, UPCAST=upcast,
        num_warps=plan.num_warps, num_stages=1,
    )  # fmt: skip
    merge_splits(buffers, output, shape, plan)


def merge_splits(
    buffers: GatherBuffers, output: torch.Tensor, shape: QsaShape, plan: GatherPlan, *, early: bool = False,
    followed: bool = False,
) -> None:  # fmt: skip
    """Attention from the parts in `buffers`, into `output` [query_heads, head_dim]; one launch.

    `early` and `followed` as in `kernels/pdl.py`.
    """
    splits, piece = plan.splits(shape), min(plan.piece, shape.head_dim)
    _merge_splits[(shape.query_heads, shape.head_dim // piece)](
        buffers.partial, buffers.statistics, output,
        SPLITS=splits, SPLITS_PAD=triton.next_power_of_2(splits), HEADS=shape.query_heads, DIM=shape.head_dim,
        PIECE=piece, EARLY=early, FOLLOWED=followed, num_warps=4, **launch_options(pdl=early),
    )  # fmt: skip
