"""Sparse decode attention over selected blocks: plain planes or interleaved blocks of a codec, in VRAM or on the host.

A thread block reads whole blocks of one KV head and issues all of its loads before its first product. Plain, K of one
block is one contiguous run of ratio x kv_heads x head_dim elements, so that a link sees runs of 4 KiB. Of interleaved
blocks (`caches/interleaved.py`) codes are exact in the products (tf32, fp32 sums); scales of a token and head multiply
scores and weights, scales of groups the codes; where a codec is rotated, a small launch rotates the query and another
the output. Splits are combined by a last kernel that rescales their running softmax.

Launches after a call's first use programmatic dependent launch (PDL) where the device has it, on Hopper and later: they
begin while the one before still runs, so that codes and scales are on their way while the query is rotated. The rule
inside a call of several launches on one stream. The first begins when everything before it is complete. Every later one
may use PDL: it reads what no launch of the call writes, then waits once, on every path, and only then reads or writes
anything that a launch of the call writes. A launch with a later one behind it lets it begin at once.

Why that is safe. A wait returns when the whole launch before is complete and its writes are seen. That launch, unless
it is the first, has waited itself, so that all before it are complete too; and the first began after all earlier calls.
So from its wait on, a launch sees what it would see without any of this, and no write overtakes a read of a buffer that
calls share: all writes come after the wait, and the next call begins with a launch without PDL.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from realkernels.bounds import check_blocks, check_selected
from realkernels.caches.interleaved import block_layout, code_bytes, scales_shape
from realkernels.codecs.codec import Codec, Planes
from realkernels.jit import JITFunction, tl, triton
from realkernels.kernels.split_kv import LOG2E
from realkernels.shape import QsaShape

GROUP_ELEMENTS = 32
"""Elements that share a scale, where it is not a whole head's."""


@triton.jit
def let_next_begin(FOLLOWED: tl.constexpr):
    """The next launch may begin once every thread block has come here; nothing else follows from it."""
    if FOLLOWED:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_last(PDL: tl.constexpr):
    """Until the launch before is complete."""
    if PDL:
        tl.extra.cuda.gdc_wait()


def has_pdl(device: torch.device) -> bool:
    """Whether launches there can use it: NVIDIA's compute capability 9.0 or later, kernels not interpreted."""
    return (
        isinstance(wait_for_last, JITFunction)
        and device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (9, 0)
    )


def launch_options(*, pdl: bool) -> dict[str, bool]:
    """What a launch is given beside its arguments."""
    return {"launch_pdl": True} if pdl else {}


ROTATED_COLUMNS = 16
"""Of rotated rows, that a thread block works out."""


@triton.jit
def _rotate(
    rows, signs, rotated, unit, factor,
    HEADS: tl.constexpr, PAD: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr,
    PDL: tl.constexpr, FOLLOWED: tl.constexpr,
):  # fmt: skip
    """Rows [HEADS, DIM] times signs [DIM, DIM] times factor, COLUMNS a thread block; rows x unit fit float16."""
    let_next_begin(FOLLOWED)
    head = tl.arange(0, PAD)
    depth = tl.arange(0, DIM)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    own = (head < HEADS)[:, None]
    matrix = tl.load(signs + depth[:, None] * DIM + column[None, :])
    wait_for_last(PDL)
    x = tl.load(rows + head[:, None] * DIM + depth[None, :], mask=own, other=0.0).to(tl.float32) * unit
    y = tl.dot(x.to(tl.float16), matrix) * factor
    tl.store(rotated + head[:, None] * DIM + column[None, :], y.to(rotated.dtype.element_ty), mask=own)


@dataclass(frozen=True, kw_only=True)
class SignRotation:
    """Rows times signs times a factor: a rotation whose entries are 0 or one magnitude, so that float16 holds them."""

    signs: torch.Tensor
    """float16 [head_dim, head_dim] of -1, 0 and 1."""
    unit: float
    """Power of two that brings rows to about the size that they are rotated to."""
    factor: float

    @staticmethod
    def of(matrix: torch.Tensor, order: torch.Tensor) -> "SignRotation | None":
        """Of a matrix [head_dim, head_dim] with its columns in this order; None where it rotates nothing."""
        if torch.equal(matrix, torch.eye(matrix.shape[0], device=matrix.device)):
            return None
        size = float(matrix.abs().max())
        unit = 2.0 ** round(math.log2(float(matrix[:, 0].norm())))
        signs = (matrix[:, order] / size).half().contiguous()
        return SignRotation(signs=signs, unit=unit, factor=size / unit)

    def run(self, rows: torch.Tensor, out: torch.Tensor, *, pdl: bool = False, followed: bool = False) -> None:
        """Of rows [heads, head_dim] into `out`; one launch. `pdl`: it may begin early; `followed`: the next may."""
        heads, dim = rows.shape
        columns = min(ROTATED_COLUMNS, dim)
        _rotate[(dim // columns,)](
            rows, self.signs, out, self.unit, self.factor, HEADS=heads, PAD=max(16, triton.next_power_of_2(heads)),
            DIM=dim, COLUMNS=columns, PDL=pdl, FOLLOWED=followed, num_warps=4, **launch_options(pdl=pdl),
        )  # fmt: skip


@triton.jit
def _block_at(selected, slot, end, TOPK: tl.constexpr, RATIO: tl.constexpr):
    """Block of each slot: the selected ones, then the open tail as one more."""
    block = tl.load(selected + slot, mask=slot < TOPK, other=0)
    return tl.where(slot < TOPK, block, end // RATIO)


@triton.jit
def _weights(s, live):
    """Largest score of each row of s [PAD, TILE], base 2, and exp2 of the distances from it; 0 where not live."""
    s = tl.where(live[None, :], s, float("-inf"))
    top = tl.max(s, axis=1)
    return top, tl.exp2(s - tl.where(top == float("-inf"), 0.0, top)[:, None])


@triton.jit
def _attend_planes(
    query, keys, values, selected, partial, statistics, end, scale,
    TOPK: tl.constexpr, RATIO: tl.constexpr, GROUP: tl.constexpr, PAD: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, TILE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)  # fastest: the halves of one block are asked for together
    split = tl.program_id(1)
    first = split * (TILE // RATIO)
    lane = tl.arange(0, TILE)
    slot = first + lane // RATIO
    token = _block_at(selected, slot, end, TOPK, RATIO) * RATIO + lane % RATIO
    live = (slot <= TOPK) & (token < end)
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
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # [PAD, TILE]
    top, p = _weights(s, live)
    o = tl.dot(p.to(v.dtype), v, input_precision="ieee")  # [PAD, DIM]
    out = split * (KV_HEADS * GROUP) + head
    tl.store(partial + out[:, None] * DIM + dims[None, :], o, mask=own[:, None])
    tl.store(statistics + out * 2, top, mask=own)
    tl.store(statistics + out * 2 + 1, tl.sum(p, axis=1), mask=own)


@triton.jit
def _of_planes(
    x, live, TILE: tl.constexpr, RATIO: tl.constexpr, GROUPS: tl.constexpr, FLAT: tl.constexpr, NONE: tl.constexpr
):
    """Numbers x as stored, for K and for V: FLAT [TILE], or [TILE, GROUPS]; NONE for tokens that are not live."""
    pair = tl.reshape(x, [TILE // RATIO, 2, RATIO * GROUPS])
    keys, values = tl.split(tl.permute(pair, (0, 2, 1)))
    if FLAT:
        keys = tl.where(live, tl.reshape(keys, [TILE]), NONE)
        values = tl.where(live, tl.reshape(values, [TILE]), NONE)
    else:
        keys = tl.where(live[:, None], tl.reshape(keys, [TILE, GROUPS]), NONE)
        values = tl.where(live[:, None], tl.reshape(values, [TILE, GROUPS]), NONE)
    return keys, values


@triton.jit
def _whole_words(low, high):
    """int32 of its halves, int16."""
    return (high.to(tl.int32) << 16) | (low.to(tl.int32) & 0xFFFF)


@triton.jit
def _scales_of(
    halves, live, TILE: tl.constexpr, RATIO: tl.constexpr, GROUPS: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Scales of K and of V, [TILE] or [TILE, GROUPS] where groups have their own; 0 for tokens that are not live.

    halves int16 [blocks, 2 x RATIO x GROUPS x HALVES]: float16 (HALVES 1) or float32 (2) as they are stored; or
    (scale, minimum, fifth bits) of groups, float16 and int32 (4): then K and V have three [TILE, GROUPS].
    """
    if HALVES == 4:
        even, odd = tl.split(tl.reshape(halves, [TILE // RATIO, 2 * RATIO * GROUPS, 2, 2]))
        scale, low = tl.split(even)
        least, high = tl.split(odd)
        ks, vs = _of_planes(scale.to(tl.float16, bitcast=True), live, TILE, RATIO, GROUPS, False, 0.0)
        km, vm = _of_planes(least.to(tl.float16, bitcast=True), live, TILE, RATIO, GROUPS, False, 0.0)
        kf, vf = _of_planes(_whole_words(low, high), live, TILE, RATIO, GROUPS, False, 0)
        keys, values = (ks, km, kf), (vs, vm, vf)
    else:
        if HALVES == 1:
            scales = halves.to(tl.float16, bitcast=True)
        else:
            low, high = tl.split(tl.reshape(halves, [TILE // RATIO, 2 * RATIO * GROUPS, 2]))
            scales = _whole_words(low, high).to(tl.float32, bitcast=True)
        keys, values = _of_planes(scales, live, TILE, RATIO, GROUPS, GROUPS == 1, 0.0)
    return keys, values


@triton.jit
def _each(x, TILE: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr):
    """Numbers [TILE, GROUPS] for every byte of their group's codes."""
    each = tl.broadcast_to(x[:, :, None], [TILE, GROUPS, WIDTH // GROUPS])
    return tl.reshape(each, [TILE, WIDTH])


@triton.jit
def _dequantised(
    codes, scale, part, NUMBERS: tl.constexpr, FACTOR: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
    GROUPS: tl.constexpr, MINIMA: tl.constexpr,
):  # fmt: skip
    """Part `part` of bytes codes [TILE, WIDTH], float32; in units of the token's scale where it has only one."""
    if MINIMA:
        of_group, least, fifth = scale
        x = NUMBERS(codes, _each(fifth, TILE, WIDTH, GROUPS), part) * _each(FACTOR(of_group), TILE, WIDTH, GROUPS)
        x += _each(least.to(tl.float32), TILE, WIDTH, GROUPS)
    else:
        x = NUMBERS(codes, scale, part)
        if GROUPS > 1:
            x *= _each(FACTOR(scale), TILE, WIDTH, GROUPS)
    return x


@triton.jit
def _attend_interleaved(
    query, key_codes, value_codes, scales, selected, partial, statistics, end, scale,
    NUMBERS: tl.constexpr, FACTOR: tl.constexpr, ELEMENT: tl.constexpr,
    BLOCK_BYTES: tl.constexpr, GROUPS: tl.constexpr, HALVES: tl.constexpr, WIDTH: tl.constexpr, ROTATED: tl.constexpr,
    TOPK: tl.constexpr, RATIO: tl.constexpr, GROUP: tl.constexpr, PAD: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr, FOLLOWED: tl.constexpr,
):  # fmt: skip
    let_next_begin(FOLLOWED)
    kv_head = tl.program_id(0)  # fastest: the halves of one block are asked for together
    split = tl.program_id(1)
    lane = tl.arange(0, TILE)
    slot = split * (TILE // RATIO) + lane // RATIO
    block = _block_at(selected, slot, end, TOPK, RATIO)
    live = (slot <= TOPK) & (block * RATIO + lane % RATIO < end)
    row = kv_head * RATIO + lane % RATIO
    byte = tl.arange(0, WIDTH)
    at = (block.to(tl.int64) * BLOCK_BYTES + row * WIDTH)[:, None] + byte[None, :]
    # A head's scales of K and V are one run of a block. They are read as int16, so that there are as many as threads:
    # of fewer, each warp would read all, in whatever order they are needed.
    SPAN: tl.constexpr = 2 * RATIO * GROUPS * HALVES
    slot = split * (TILE // RATIO) + tl.arange(0, TILE // RATIO)
    block = _block_at(selected, slot, end, TOPK, RATIO)
    s_at = (block.to(tl.int64) * (BLOCK_BYTES // 2) + kv_head * SPAN)[:, None] + tl.arange(0, SPAN)[None, :]
    there = (slot <= TOPK) & (block * RATIO < end)
    kw = tl.load(key_codes + at, mask=live[:, None], other=0)
    vw = tl.load(value_codes + at, mask=live[:, None], other=0)
    tl.debug_barrier()  # codes are asked for before anything waits for scales: the compiler keeps loads on their side
    halves = tl.load(scales + s_at, mask=there[:, None], other=0)
    wait_for_last(PDL)  # for the query; nothing is written before it
    ks, vs = _scales_of(halves, live, TILE, RATIO, GROUPS, HALVES)
    rows = tl.arange(0, PAD)
    own = rows < GROUP
    head = kv_head * GROUP + rows
    PARTS: tl.constexpr = DIM // WIDTH
    MINIMA: tl.constexpr = HALVES == 4
    s = tl.zeros([PAD, TILE], tl.float32)
    for part in tl.static_range(PARTS):
        element = part * WIDTH + byte if ROTATED else ELEMENT(byte, part, PARTS)
        q = tl.load(query + head[:, None] * DIM + element[None, :], mask=own[:, None], other=0.0).to(tl.float32)
        k = _dequantised(kw, ks, part, NUMBERS, FACTOR, TILE, WIDTH, GROUPS, MINIMA)
        s = tl.dot(q, tl.trans(k), s, input_precision="tf32")
    if GROUPS == 1 and not MINIMA:
        s *= FACTOR(ks)[None, :]
    top, p = _weights(s * scale, live)
    mass = tl.sum(p, axis=1)
    if GROUPS == 1 and not MINIMA:
        p *= FACTOR(vs)[None, :]
    out = split * (KV_HEADS * GROUP) + head
    for part in tl.static_range(PARTS):
        v = _dequantised(vw, vs, part, NUMBERS, FACTOR, TILE, WIDTH, GROUPS, MINIMA)
        o = tl.dot(p, v, input_precision="tf32")
        element = ELEMENT(byte, part, PARTS)
        tl.store(partial + out[:, None] * DIM + element[None, :], o, mask=own[:, None])
    tl.store(statistics + out * 2, top, mask=own)
    tl.store(statistics + out * 2 + 1, mass, mask=own)


@triton.jit
def _combine_splits(
    partial, statistics, output,
    SPLITS: tl.constexpr, SPLITS_PAD: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr,
    PDL: tl.constexpr, FOLLOWED: tl.constexpr,
):  # fmt: skip
    let_next_begin(FOLLOWED)
    wait_for_last(PDL)
    head = tl.program_id(0)
    dims = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    split = tl.arange(0, SPLITS_PAD)
    live = split < SPLITS
    row = split * HEADS + head
    top = tl.load(statistics + row * 2, mask=live, other=float("-inf"))
    mass = tl.load(statistics + row * 2 + 1, mask=live, other=0.0)
    o = tl.load(partial + row[:, None] * DIM + dims[None, :], mask=live[:, None], other=0.0)  # [SPLITS_PAD, COLUMNS]
    weight = tl.exp2(top - tl.max(top, axis=0))
    total = tl.sum(weight * mass, axis=0)
    combined = tl.sum(o * weight[:, None], axis=0) / total
    tl.store(output + head * DIM + dims, combined.to(output.dtype.element_ty))


@dataclass(frozen=True, kw_only=True)
class GatherPlan:
    """How one decode gather is divided; the defaults were fastest on an H200."""

    blocks_per_split: int = 8
    """Selected blocks of a thread block, of one KV head."""
    combined_columns: int = 64
    """Output elements of one combining thread block."""

    def splits(self, shape: QsaShape) -> int:
        """Thread blocks along the selection; the open tail counts as one more block."""
        return -(-(shape.topk + 1) // self.blocks_per_split)


class _Gather:
    """Splits of one gather and how they are combined; partial results belong to one stream."""

    def __init__(self, shape: QsaShape, *, device: torch.device, plan: GatherPlan | None = None) -> None:
        self.shape, self.plan = shape, plan or GatherPlan()
        if self.plan.blocks_per_split * shape.ratio < 16:
            raise ValueError(f"blocks_per_split {self.plan.blocks_per_split} makes tiles below 16 tokens")
        splits = self.plan.splits(shape)
        self._partial = torch.empty(splits, shape.query_heads, shape.head_dim, dtype=torch.float32, device=device)
        self._statistics = torch.empty(splits, shape.query_heads, 2, dtype=torch.float32, device=device)
        """Running maximum (base 2) and mass of each split and head."""
        self._constants: dict[str, Any] = {
            "TOPK": shape.topk, "RATIO": shape.ratio, "GROUP": shape.group,
            "PAD": max(16, triton.next_power_of_2(shape.group)), "KV_HEADS": shape.kv_heads, "DIM": shape.head_dim,
            "TILE": self.plan.blocks_per_split * shape.ratio, "num_warps": 4, "num_stages": 1,
        }  # fmt: skip

    def _grid(self, end: int) -> tuple[int, int]:
        """Thread blocks; ValueError for a context that is read whole."""
        if end // self.shape.ratio < self.shape.topk:
            raise ValueError(f"a context of {end} tokens has fewer than {self.shape.topk} blocks: it is read whole")
        return self.shape.kv_heads, self.plan.splits(self.shape)

    def _combine(self, output: torch.Tensor, *, pdl: bool = False, followed: bool = False) -> None:
        """Attention from the splits, into `output`; one launch. `pdl` and `followed` as of `SignRotation.run`."""
        shape, splits = self.shape, self.plan.splits(self.shape)
        columns = min(self.plan.combined_columns, shape.head_dim)
        _combine_splits[(shape.query_heads, shape.head_dim // columns)](
            self._partial, self._statistics, output,
            SPLITS=splits, SPLITS_PAD=triton.next_power_of_2(splits), HEADS=shape.query_heads, DIM=shape.head_dim,
            COLUMNS=columns, PDL=pdl, FOLLOWED=followed, num_warps=4, **launch_options(pdl=pdl),
        )  # fmt: skip


class PlaneGather(_Gather):
    """Gathers from planes of K and V."""

    def run(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, selected: torch.Tensor, end: int,
        output: torch.Tensor,
    ) -> None:  # fmt: skip
        """Attention of the token at position `end` - 1 over `selected` blocks and the tail, into `output`.

        query and output [query_heads, head_dim]; keys and values [tokens, kv_heads, head_dim], on the device or mapped
        host memory; selected int32 [topk], each below end // ratio (trusted: see `bounds.check_selected`). fp16 or
        bf16. A NaN in a selected row reaches the heads that share its KV head and nobody else; nothing else is read.
        Two launches, capturable in a CUDA graph.
        """
        upcast = query.device.type == "cpu"  # the interpreter multiplies the raw bits of bf16
        _attend_planes[self._grid(end)](
            query, keys, values, selected, self._partial, self._statistics, end, LOG2E * self.shape.head_dim**-0.5,
            UPCAST=upcast, **self._constants,
        )  # fmt: skip
        self._combine(output)


class InterleavedGather(_Gather):
    """Gathers from the interleaved blocks of a codec, with its rotations as matrices on the device.

    ValueError for a codec that is not kept in blocks, or a head that is no power of two from 32 on.
    """

    def __init__(self, codec: Codec, shape: QsaShape, *, device: torch.device, plan: GatherPlan | None = None) -> None:
        super().__init__(shape, device=device, plan=plan)
        dim = shape.head_dim
        block = block_layout(codec, block_tokens=shape.ratio, kv_heads=shape.kv_heads, head_dim=dim)
        if dim < GROUP_ELEMENTS or dim & (dim - 1):
            raise ValueError(f"head_dim is {dim}: this kernel takes powers of two from {GROUP_ELEMENTS} on")
        width, (groups, scale_bytes) = code_bytes(block), scales_shape(block)
        unit, places = torch.eye(dim, device=device), torch.arange(dim, device=device)
        self._queries = SignRotation.of(codec.rotate_query(unit), places.view(-1, dim // width).T.flatten())
        """Into the order of the codes' parts; None where queries are not rotated."""
        self._outputs = SignRotation.of(codec.rotate_output(unit), places)
        self._rotated = torch.empty(shape.query_heads, dim, device=device)
        """A query or an output on its way, overwritten by the next call on the stream."""
        self.pdl = has_pdl(device)
        """Whether launches after a call's first use programmatic dependent launch."""
        functions = codec.interleaved
        self._constants |= {
            "NUMBERS": functions.numbers, "FACTOR": functions.factor, "ELEMENT": functions.element,
            "BLOCK_BYTES": block.stride, "GROUPS": groups, "HALVES": scale_bytes // 2, "WIDTH": width,
            "ROTATED": self._queries is not None,
        }  # fmt: skip

    def run(
        self, query: torch.Tensor, planes: Planes, selected: torch.Tensor, end: int, output: torch.Tensor, *,
        checked: bool = True,
    ) -> None:  # fmt: skip
        """Attention of the token at position `end` - 1 over `selected` blocks and the tail, into `output`.

        query and output [query_heads, head_dim] in the model's basis; planes of `blocks.block_planes`, on the device or
        mapped host memory; selected int32 [topk], each below end // ratio: IndexError before anything is launched. That
        waits for the device; `checked=False` vouches for them, as in a CUDA graph. A NaN in a selected row reaches the
        heads that share its KV head and nobody else; nothing else is read, scales of the open block apart, which is
        read whole. Two launches, and one each for a query and an output that are rotated.
        """
        shape, pdl, grid = self.shape, self.pdl, self._grid(end)
        check_blocks(planes, end=end, shape=shape)
        if checked:
            check_selected(selected, blocks=shape.blocks(end))
        parts, scales = planes.parts, planes.parts["key_scale"]  # those of V lie behind those of K
        second = pdl and self._queries is not None
        if self._queries is not None:
            self._queries.run(query, self._rotated, followed=pdl)
            query = self._rotated
        _attend_interleaved[grid](
            query, parts["key_data"], parts["value_data"], scales.view(torch.int16), selected, self._partial,
            self._statistics, end, LOG2E * shape.head_dim**-0.5,
            PDL=second, FOLLOWED=pdl, **self._constants,
            **launch_options(pdl=second),
        )  # fmt: skip
        if self._outputs is None:
            self._combine(output, pdl=pdl)
        else:
            self._combine(self._rotated, pdl=pdl, followed=pdl)
            self._outputs.run(self._rotated, output, pdl=pdl)
