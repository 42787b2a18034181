"""Sparse decode attention over quantised blocks in records (`formats/blocks.py`), in VRAM or in mapped host memory.

A program reads its selected blocks of one KV head, codes and scales of K and V, before it multiplies anything. Codes
are exact in the products (tf32, fp32 sums); scales of a token and head multiply scores and shares, scales of groups the
codes. Where a format is rotated, a small launch rotates the query and another the output.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from realkernels.bounds import check_selected
from realkernels.formats.blocks import record_of, row_bytes
from realkernels.formats.format import Format
from realkernels.formats.planes import Planes
from realkernels.gather import LOG2E, GatherBuffers, GatherPlan, merge_splits
from realkernels.shape import QsaShape

INT8: tl.constexpr = tl.constexpr(0)
INT4: tl.constexpr = tl.constexpr(1)
GGML4: tl.constexpr = tl.constexpr(2)
EXL3: tl.constexpr = tl.constexpr(3)

GROUP_ELEMENTS = 32
"""Elements that share a scale, where it is not a whole head's."""

ROTATED_PIECE = 16
"""Columns of rotated rows that a program works out."""


@triton.jit
def _element(word, number, CODES: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr):
    """Element of the head that part `number` of byte `word` holds."""
    if WIDTH == DIM:
        element = word
    elif CODES == GGML4:
        element = word // 16 * 32 + word % 16 + 16 * number
    else:
        element = 2 * word + number
    return element


@triton.jit
def _numbers(codes, scale, number, CODES: tl.constexpr):
    """Part `number` of bytes codes [TILE, WIDTH] in units of its scale, float32; scale [TILE] as it is stored."""
    if CODES == INT8:
        x = codes.to(tl.int8, bitcast=True).to(tl.float32)
    else:
        x = ((codes >> (4 * number)) & 15).to(tl.float32)
        if CODES == INT4:
            x -= (scale.to(tl.int32, bitcast=True) & 15).to(tl.float32)[:, None]
        elif CODES == GGML4:
            x -= 8.0
        else:
            x = x * 0.125 - 0.9375
    return x


@triton.jit
def _scales(scales, at, live, GROUPS: tl.constexpr):
    """Scales [TILE], or [TILE, GROUPS] where groups have their own, as they are stored."""
    if GROUPS == 1:
        found = tl.load(scales + at, mask=live, other=0.0)
    else:
        at = at[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]
        found = tl.load(scales + at, mask=live[:, None], other=0.0)
    return found


@triton.jit
def _factor(scale, CODES: tl.constexpr):
    """What a stored scale multiplies by, float32: without the zero point in its low bits."""
    if CODES == INT4:
        factor = (scale.to(tl.int32, bitcast=True) & -16).to(tl.float32, bitcast=True)
    else:
        factor = scale.to(tl.float32)
    return factor


@triton.jit
def _spread(scale, TILE: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr):
    """Scales [TILE, GROUPS] beside the codes that they belong to, [TILE, WIDTH]."""
    each = tl.broadcast_to(scale[:, :, None], [TILE, GROUPS, WIDTH // GROUPS])
    return tl.reshape(each, [TILE, WIDTH])


@triton.jit
def _rotate(
    rows, signs, turned, unit, factor,
    HEADS: tl.constexpr, PAD: tl.constexpr, DIM: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Rows [HEADS, DIM] times signs [DIM, DIM] times factor, PIECE columns a program; rows x unit fit float16."""
    head = tl.arange(0, PAD)
    depth = tl.arange(0, DIM)
    column = tl.program_id(0) * PIECE + tl.arange(0, PIECE)
    own = (head < HEADS)[:, None]
    x = tl.load(rows + head[:, None] * DIM + depth[None, :], mask=own, other=0.0).to(tl.float32) * unit
    y = tl.dot(x.to(tl.float16), tl.load(signs + depth[:, None] * DIM + column[None, :])) * factor
    tl.store(turned + head[:, None] * DIM + column[None, :], y.to(turned.dtype.element_ty), mask=own)


@triton.jit
def _attend_split(
    query, key_codes, key_scales, value_codes, value_scales, selected, partial, statistics, end, scale,
    RECORD: tl.constexpr, SCALES: tl.constexpr, CODES: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
    ROTATED: tl.constexpr, TOPK: tl.constexpr, RATIO: tl.constexpr, GROUP: tl.constexpr, PAD: tl.constexpr,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)  # fastest: the halves of one record are asked for together
    split = tl.program_id(1)
    lane = tl.arange(0, TILE)
    slot = split * (TILE // RATIO) + lane // RATIO
    block = tl.load(selected + slot, mask=slot < TOPK, other=0)
    block = tl.where(slot < TOPK, block, end // RATIO)  # the open tail is one more block
    live = (slot <= TOPK) & (block * RATIO + lane % RATIO < end)
    row = kv_head * RATIO + lane % RATIO
    word = tl.arange(0, WIDTH)
    at = (block.to(tl.int64) * RECORD + row * WIDTH)[:, None] + word[None, :]
    s_at = block.to(tl.int64) * (SCALES // GROUPS) + row
    kw = tl.load(key_codes + at, mask=live[:, None], other=0)
    ks = _scales(key_scales, s_at, live, GROUPS)
    vw = tl.load(value_codes + at, mask=live[:, None], other=0)
    vs = _scales(value_scales, s_at, live, GROUPS)
    rows = tl.arange(0, PAD)
    own = rows < GROUP
    head = kv_head * GROUP + rows
    s = tl.zeros([PAD, TILE], tl.float32)
    for number in tl.static_range(DIM // WIDTH):
        element = number * WIDTH + word if ROTATED else _element(word, number, CODES, WIDTH, DIM)
        q = tl.load(query + head[:, None] * DIM + element[None, :], mask=own[:, None], other=0.0).to(tl.float32)
        k = _numbers(kw, ks, number, CODES)
        if GROUPS > 1:
            k *= _spread(_factor(ks, CODES), TILE, WIDTH, GROUPS)
        s = tl.dot(q, tl.trans(k), s, input_precision="tf32")
    if GROUPS == 1:
        s *= _factor(ks, CODES)[None, :]
    s = tl.where(live[None, :], s * scale, float("-inf"))  # base 2
    top = tl.max(s, axis=1)
    p = tl.exp2(s - tl.where(top == float("-inf"), 0.0, top)[:, None])
    mass = tl.sum(p, axis=1)
    if GROUPS == 1:
        p *= _factor(vs, CODES)[None, :]
    out = split * (KV_HEADS * GROUP) + head
    for number in tl.static_range(DIM // WIDTH):
        v = _numbers(vw, vs, number, CODES)
        if GROUPS > 1:
            v *= _spread(_factor(vs, CODES), TILE, WIDTH, GROUPS)
        o = tl.dot(p, v, input_precision="tf32")
        element = _element(word, number, CODES, WIDTH, DIM)
        tl.store(partial + out[:, None] * DIM + element[None, :], o, mask=own[:, None])
    tl.store(statistics + out * 2, top, mask=own)
    tl.store(statistics + out * 2 + 1, mass, mask=own)


_CODES = {"int8_per_token_head": 0, "q8_0": 0, "int4_per_token_head": 1, "q4_0": 2, "exl3_k4v4": 3}


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A rotation: rows times signs times a factor. Entries are 0 or one magnitude, so that float16 holds them."""

    signs: torch.Tensor
    """float16 [head_dim, head_dim] of -1, 0 and 1."""
    unit: float
    """Power of two that brings rows to about the size that they are rotated to."""
    factor: float

    @staticmethod
    def of(matrix: torch.Tensor, order: torch.Tensor) -> "Turn | None":
        """Of a matrix [head_dim, head_dim] with its columns in this order; None where it rotates nothing."""
        if torch.equal(matrix, torch.eye(matrix.shape[0], device=matrix.device)):
            return None
        size = float(matrix.abs().max())
        unit = 2.0 ** round(math.log2(float(matrix[:, 0].norm())))
        signs = (matrix[:, order] / size).half().contiguous()
        return Turn(signs=signs, unit=unit, factor=size / unit)

    def run(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Of rows [heads, head_dim] into `out`; one launch."""
        heads, dim = rows.shape
        piece = min(ROTATED_PIECE, dim)
        _rotate[(dim // piece,)](
            rows, self.signs, out, self.unit, self.factor, HEADS=heads, PAD=max(16, triton.next_power_of_2(heads)),
            DIM=dim, PIECE=piece, num_warps=4,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How the kernels read one format: its codes, where its rows lie, its rotations as matrices on the device."""

    fmt: Format
    codes: int
    groups: int
    width: int
    """Bytes of codes of a token and head."""
    record_bytes: int
    queries: Turn | None
    """Into the order of the codes' parts; None where queries are not rotated."""
    outputs: Turn | None
    turned: torch.Tensor
    """float32 [query_heads, head_dim]: a query or an output on its way, overwritten by the next call on the stream."""

    @staticmethod
    def of(fmt: Format, shape: QsaShape, *, device: torch.device) -> "Reading":
        """ValueError for a format that is not kept in blocks, or a head that is no power of two from 32 on."""
        dim = shape.head_dim
        record = record_of(fmt, block_tokens=shape.ratio, kv_heads=shape.kv_heads, head_dim=dim)
        if dim < GROUP_ELEMENTS or dim & (dim - 1):
            raise ValueError(f"head_dim is {dim}: this kernel takes powers of two from {GROUP_ELEMENTS} on")
        width = row_bytes(record, "key_data")
        per_head = next(part for part in record.parts if part.name == "key_scale").shape[2:]
        unit = torch.eye(dim, device=device)
        places = torch.arange(dim, device=device)
        return Reading(
            fmt=fmt, codes=_CODES[fmt.name], groups=per_head[0] if per_head else 1, width=width,
            record_bytes=record.stride,
            queries=Turn.of(fmt.rotate_query(unit), places.view(-1, dim // width).T.flatten()),
            outputs=Turn.of(fmt.rotate_output(unit), places),
            turned=torch.empty(shape.query_heads, dim, device=device),
        )  # fmt: skip


def gather_records(
    query: torch.Tensor,
    planes: Planes,
    selected: torch.Tensor,
    end: int,
    output: torch.Tensor,
    buffers: GatherBuffers,
    shape: QsaShape,
    plan: GatherPlan,
    reading: Reading,
    *,
    checked: bool = True,
) -> None:
    """Attention of the token at position `end` - 1 over `selected` blocks and the tail, into `output`.

    query and output [query_heads, head_dim] in the model's basis; planes of `blocks.block_planes`, on the device or
    mapped host memory; selected int32 [topk], each below end // ratio: IndexError before anything is launched. That
    waits for the device; `checked=False` vouches for them, as in a CUDA graph. A NaN in a selected row reaches the
    heads that share its KV head and nobody else; nothing else is read. Two launches, and one
    each for a query and an output that are rotated.
    """
    if plan.blocks_per_split * shape.ratio < 16:
        raise ValueError(f"blocks_per_split {plan.blocks_per_split} makes tiles below 16 tokens")
    if end // shape.ratio < shape.topk:
        raise ValueError(f"a context of {end} tokens has fewer than {shape.topk} blocks: it is read whole")
    if end > planes.slots or planes.page_tokens != shape.ratio:
        raise ValueError(
            f"a context of {end} tokens in blocks of {shape.ratio} does not fit {planes.pages} blocks of "
            f"{planes.page_tokens}"
        )
    if checked:
        check_selected(selected, blocks=shape.blocks(end))
    parts = planes.parts
    splits, dim = plan.splits(shape), shape.head_dim
    if reading.queries is not None:
        reading.queries.run(query, reading.turned)
        query = reading.turned
    _attend_split[(shape.kv_heads, splits)](
        query, parts["key_data"], parts["key_scale"], parts["value_data"], parts["value_scale"], selected,
        buffers.partial, buffers.statistics, end, LOG2E * dim**-0.5,
        RECORD=reading.record_bytes, SCALES=parts["key_scale"].stride(0), CODES=reading.codes, GROUPS=reading.groups,
        WIDTH=reading.width, ROTATED=reading.queries is not None, TOPK=shape.topk, RATIO=shape.ratio,
        GROUP=shape.group, PAD=max(16, triton.next_power_of_2(shape.group)), KV_HEADS=shape.kv_heads, DIM=dim,
        TILE=plan.blocks_per_split * shape.ratio,
        num_warps=plan.num_warps, num_stages=1,
    )  # fmt: skip
    if reading.outputs is None:
        merge_splits(buffers, output, shape, plan)
    else:
        merge_splits(buffers, reading.turned, shape, plan)
        reading.outputs.run(reading.turned, output)
