"""Sparse decode attention over quantised blocks in records (`formats/blocks.py`), in VRAM or in mapped host memory.

A program reads its selected blocks of one KV head, codes and scales of K and V, before it multiplies anything. Codes
are exact in the products (tf32, fp32 sums); scales of a token and head multiply scores and shares, scales of groups the
codes. Where a format is rotated, a small launch rotates the query and another the output. Launches after a call's first
begin early where the device can (`kernels/pdl.py`): codes and scales are on their way while the query is rotated.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from realkernels.bounds import check_selected
from realkernels.formats.blocks import record_of, row_bytes, row_shape
from realkernels.formats.format import Format
from realkernels.formats.planes import Planes
from realkernels.gather import LOG2E, GatherBuffers, GatherPlan, merge_splits
from realkernels.kernels.pdl import has_pdl, launch_options, let_next_begin, wait_for_last
from realkernels.shape import QsaShape
from realkernels.turn import Turn

INT8: tl.constexpr = tl.constexpr(0)
INT4: tl.constexpr = tl.constexpr(1)
GGML4: tl.constexpr = tl.constexpr(2)
EXL3: tl.constexpr = tl.constexpr(3)

GROUP_ELEMENTS = 32
"""Elements that share a scale, where it is not a whole head's."""


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
def _parted(
    halves, live, TILE: tl.constexpr, RATIO: tl.constexpr, GROUPS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Scales of K and of V, [TILE] or [TILE, GROUPS] where groups have their own; 0 for tokens that are not live.

    halves int16 [blocks, 2 x RATIO x GROUPS x WORDS]: float16 (WORDS 1) or float32 (2) as they are stored.
    """
    if WORDS == 1:
        scales = halves.to(tl.float16, bitcast=True)
    else:
        low, high = tl.split(tl.reshape(halves, [TILE // RATIO, 2 * RATIO * GROUPS, 2]))
        scales = ((high.to(tl.int32) << 16) | (low.to(tl.int32) & 0xFFFF)).to(tl.float32, bitcast=True)
    pair = tl.reshape(scales, [TILE // RATIO, 2, RATIO * GROUPS])
    keys, values = tl.split(tl.permute(pair, (0, 2, 1)))
    if GROUPS == 1:
        keys = tl.where(live, tl.reshape(keys, [TILE]), 0.0)
        values = tl.where(live, tl.reshape(values, [TILE]), 0.0)
    else:
        keys = tl.where(live[:, None], tl.reshape(keys, [TILE, GROUPS]), 0.0)
        values = tl.where(live[:, None], tl.reshape(values, [TILE, GROUPS]), 0.0)
    return keys, values


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
def _attend_split(
    query, key_codes, value_codes, scales, selected, partial, statistics, end, scale,
    RECORD: tl.constexpr, CODES: tl.constexpr, GROUPS: tl.constexpr, WORDS: tl.constexpr, WIDTH: tl.constexpr,
    ROTATED: tl.constexpr, TOPK: tl.constexpr, RATIO: tl.constexpr, GROUP: tl.constexpr, PAD: tl.constexpr,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr, FOLLOWED: tl.constexpr,
):  # fmt: skip
    let_next_begin(FOLLOWED)
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
    # A head's scales of K and V are one run of a block. They are read as int16, so that there are as many as threads:
    # of fewer, each warp would read all, in whatever order they are needed.
    SPAN: tl.constexpr = 2 * RATIO * GROUPS * WORDS
    slot = split * (TILE // RATIO) + tl.arange(0, TILE // RATIO)
    block = tl.load(selected + slot, mask=slot < TOPK, other=0)
    block = tl.where(slot < TOPK, block, end // RATIO)
    s_at = (block.to(tl.int64) * (RECORD // 2) + kv_head * SPAN)[:, None] + tl.arange(0, SPAN)[None, :]
    there = (slot <= TOPK) & (block * RATIO < end)
    kw = tl.load(key_codes + at, mask=live[:, None], other=0)
    vw = tl.load(value_codes + at, mask=live[:, None], other=0)
    tl.debug_barrier()  # codes are asked for before anything waits for scales: the compiler keeps loads on their side
    halves = tl.load(scales + s_at, mask=there[:, None], other=0)
    wait_for_last(EARLY)  # for the query; nothing is written before it
    ks, vs = _parted(halves, live, TILE, RATIO, GROUPS, WORDS)
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
    early: bool = False
    """Whether launches after a call's first begin early."""

    @staticmethod
    def of(fmt: Format, shape: QsaShape, *, device: torch.device) -> "Reading":
        """ValueError for a format that is not kept in blocks, or a head that is no power of two from 32 on."""
        dim = shape.head_dim
        record = record_of(fmt, block_tokens=shape.ratio, kv_heads=shape.kv_heads, head_dim=dim)
        if dim < GROUP_ELEMENTS or dim & (dim - 1):
            raise ValueError(f"head_dim is {dim}: this kernel takes powers of two from {GROUP_ELEMENTS} on")
        width = row_bytes(record, "key_data")
        per_head = row_shape(record, "key_scale")
        unit = torch.eye(dim, device=device)
        places = torch.arange(dim, device=device)
        return Reading(
            fmt=fmt, codes=_CODES[fmt.name], groups=per_head[0] if per_head else 1, width=width,
            record_bytes=record.stride,
            queries=Turn.of(fmt.rotate_query(unit), places.view(-1, dim // width).T.flatten()),
            outputs=Turn.of(fmt.rotate_output(unit), places),
            turned=torch.empty(shape.query_heads, dim, device=device),
            early=has_pdl(device),
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
    heads that share its KV head and nobody else; nothing else is read, scales of the open block apart, which is read
    whole. Two launches, and one each for a query and an output that are rotated; buffers and `reading` belong to one
    stream.
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
    parts, scales = planes.parts, planes.parts["key_scale"]  # those of V lie behind those of K
    splits, dim, early = plan.splits(shape), shape.head_dim, reading.early
    if reading.queries is not None:
        reading.queries.run(query, reading.turned, followed=early)
        query = reading.turned
    second = early and reading.queries is not None
    _attend_split[(shape.kv_heads, splits)](
        query, parts["key_data"], parts["value_data"], scales.view(torch.int16), selected, buffers.partial,
        buffers.statistics, end, LOG2E * dim**-0.5,
        RECORD=reading.record_bytes, CODES=reading.codes, GROUPS=reading.groups, WORDS=scales.itemsize // 2,
        WIDTH=reading.width, ROTATED=reading.queries is not None, TOPK=shape.topk, RATIO=shape.ratio,
        GROUP=shape.group, PAD=max(16, triton.next_power_of_2(shape.group)), KV_HEADS=shape.kv_heads, DIM=dim,
        TILE=plan.blocks_per_split * shape.ratio, EARLY=second, FOLLOWED=early,
        num_warps=plan.num_warps, num_stages=1, **launch_options(pdl=second),
    )  # fmt: skip
    if reading.outputs is None:
        merge_splits(buffers, output, shape, plan, early=early)
    else:
        merge_splits(buffers, reading.turned, shape, plan, early=early, followed=early)
        reading.outputs.run(reading.turned, output, early=early)
