"""llama.cpp's cache types q8_0, q4_0, q5_1 and iq4_nl: groups of 32 elements of a head with a float16 scale.

| bytes of a group, inline | q8_0 | q4_0 | q5_1 | iq4_nl |
|---|---|---|---|---|
| scale, float16 | 0 .. 1 | 0 .. 1 | 0 .. 1 | 0 .. 1 |
| minimum, float16 | | | 2 .. 3 | |
| fifth bits: that of element j is bit j of an int32 | | | 4 .. 7 | |
| codes | 2 .. 33, two's complement | 2 .. 17, nibbles | 8 .. 23, nibbles | 2 .. 17, nibbles |

Nibbles: element j in the low half of byte j, element j + 16 in the high one. inline: key_blocks and value_blocks uint8
[page, token, head, D / 32, bytes of a group]. aligned: each row of the table in a plane of its own, page, head, token,
group; the same bytes. So codes of q5_1 and iq4_nl lie in runs of 16 B as those of q4_0, which the decode attention
kernels take apart by words, and fifth bits in a word a group beside them. Source: llama.cpp `ggml-common.h`.

q8_0: scale = absmax / 127, code = round(x / scale), x = code x scale. q4_0: scale = m / -8 where m is the first element
of the largest magnitude with its sign; code = floor(x / scale + 8.5) in 0 .. 15, x = (code - 8) x scale: what lies as
far as m on the other side loses up to a whole scale. Codes of both are found with the scale as stored, in float16.

q5_1 and iq4_nl are quantised as by the copy kernel that fills a cache (`ggml-cuda/cpy-utils.cuh`), in float32. q5_1:
scale = (max - min) / 31, code = floor((x - min) (1 / scale) + 0.5), x = code x scale + min. iq4_nl: d = m / -127, the
code is that of the value of LEVELS nearest to x (1 / d), the larger of two as near, and the scale is the one of least
squared error weighted with x^2: sum(x^2 v x) / sum(x^2 v v) over the values v, each sum by halves (there: in turn).

A group that holds NaN or infinity, or whose scale or minimum exceeds 65,504, is NaN: those 32 elements of that token
only.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch

from realkernels.codecs import on_device as dev
from realkernels.codecs.arithmetic import folded_sum, half_scale, over
from realkernels.codecs.codec import (
    PLANES,
    Arrangement,
    Part,
    PartLayout,
    Plane,
    Planes,
    RowCodec,
    Rows,
    check_multiple,
)
from realkernels.codecs.per_token_head import dequantise_int8
from realkernels.jit import tl, triton

GROUP = 32
HALF = GROUP // 2
SCALE = Part("scale", torch.float16)
NIBBLES = Part("data", torch.uint8, (HALF,))


@dataclass(frozen=True, kw_only=True)
class Ggml(RowCodec):
    """A scale and codes for each 32 elements."""

    arrangements: ClassVar[tuple[Arrangement, ...]] = ("inline", "aligned")
    group: ClassVar[int] = GROUP
    decode_form: ClassVar[str] = "groups"
    block: ClassVar[tuple[Part, ...]]
    """A group's parts in their order, without the plane's name."""

    def check(self, head_dim: int) -> None:
        """Whole groups."""
        check_multiple(self.name, head_dim, GROUP)

    def published(self, head_dim: int) -> tuple[PartLayout, ...]:
        """A tensor of blocks for K and one for V; page, token, head, group."""
        return tuple(
            PartLayout(
                f"{plane}_blocks",
                tuple(Part(f"{plane}_{part.name}", part.dtype, part.shape) for part in self.block),
                (head_dim // GROUP,),
            )
            for plane in PLANES
        )

    def kernel_parts(self, plane: Plane, planes: Planes) -> tuple[torch.Tensor, ...]:
        """Codes, scales and what else a group has."""
        others = tuple(planes.parts[f"{plane}_{part.name}"] for part in self.block[1:-1])
        return *super().kernel_parts(plane, planes), *others


def _signed_largest(groups: torch.Tensor) -> torch.Tensor:
    """[..., 1]: the first element of the largest magnitude with its sign, of float32 [..., 32]."""
    return groups.gather(-1, groups.abs().argmax(dim=-1, keepdim=True))


def _codes(groups: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Groups over their scales, 0 where that is no number."""
    return (groups / scale.float()).nan_to_num(0.0, posinf=0.0, neginf=0.0)


def _packed(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [..., 16] of codes [..., 32] below 16."""
    codes = codes.to(torch.uint8)
    return codes[..., :HALF] | codes[..., HALF:] << 4


def _unpacked(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [..., 32] of bytes [..., 16]."""
    return torch.cat((codes & 15, codes >> 4), dim=-1)


def _one_over(step: torch.Tensor) -> torch.Tensor:
    """0 of 0."""
    return torch.where(step != 0, 1 / step, 0.0)


@triton.jit
def _reciprocal(step, ROWS: tl.constexpr):
    """`_one_over` of steps [ROWS]."""
    return tl.where(step != 0.0, tl.div_rn(tl.full([ROWS], 1.0, tl.float32), step), 0.0)


@triton.jit
def _quotients(x, scale):
    """`_codes` of groups x [ROWS, 32] and scales float16 [ROWS]."""
    return dev.finite_or_zero(tl.div_rn(x, scale.to(tl.float32)[:, None]))


@triton.jit
def _store_nibbles(at, codes, there, ROWS: tl.constexpr):
    """`_packed` codes int32 [ROWS, 32] behind the pointers `at` [ROWS]."""
    halves = tl.reshape(codes << (tl.arange(0, 32) // 16 * 4)[None, :], [ROWS, 2, 16])
    tl.store(at[:, None] + tl.arange(0, 16)[None, :], tl.sum(halves, axis=1).to(tl.uint8), mask=there[:, None])


@triton.jit
def _first_largest(x):
    """[ROWS]: `_signed_largest` of float32 [ROWS, 32]."""
    bits = dev.magnitude_bits(x)
    lane = tl.arange(0, 32)[None, :]
    first = tl.min(tl.where(bits == tl.max(bits, axis=1)[:, None], lane, 32), axis=1)
    chosen = tl.where(lane == first[:, None], x.to(tl.int32, bitcast=True), 0)
    return tl.sum(chosen, axis=1).to(tl.float32, bitcast=True)


@triton.jit
def _encode_q8_0(x, parts, place, there, keep, BITS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    scale = dev.half_scale(tl.div_rn(dev.largest_magnitude(x, 1), tl.full([ROWS], 127.0, tl.float32)))
    codes = dev.between(dev.nearest_even(_quotients(x, scale)), -127.0, 127.0).to(tl.int32)
    dev.store_codes(dev.pointer(parts[0], place)[:, None], codes, keep, ROWS, WIDTH, 8)
    tl.store(dev.pointer(parts[1], place), scale, mask=there)


@triton.jit
def _encode_q4_0(x, parts, place, there, keep, BITS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    scale = dev.half_scale(_first_largest(x) * -0.125)
    codes = dev.between(tl.floor(_quotients(x, scale) + 8.5), 0.0, 15.0).to(tl.int32)
    _store_nibbles(dev.pointer(parts[0], place), codes, there, ROWS)
    tl.store(dev.pointer(parts[1], place), scale, mask=there)


@triton.jit
def _dequantise_q4_0(out, parts, WAYS: tl.constexpr, place, live, BITS: tl.constexpr, WIDTH: tl.constexpr):
    scale = dev.load_scale(parts[1], WAYS[1], place, live)
    codes = dev.load_codes(parts[0], WAYS[0], place, live, WIDTH // 2)
    low, high = ((codes & 15).to(tl.float32) - 8.0) * scale, ((codes >> 4).to(tl.float32) - 8.0) * scale
    dev.store_halves(out, low, high, live, WIDTH)


class Q80(Ggml):
    """8 bits."""

    block = (SCALE, Part("data", torch.uint8, (GROUP,)))
    kernels = dev.RowKernels(_encode_q8_0, dequantise_int8)

    def encode(self, plane: Plane, rows: torch.Tensor, planes: Planes) -> Rows:
        """The largest element of a group has the code 127 or -127."""
        groups = rows.unflatten(-1, (-1, GROUP))
        scale = half_scale(over(groups.abs().amax(dim=-1, keepdim=True), 127.0))
        codes = _codes(groups, scale).round().clamp(-127, 127)
        return {"data": codes.to(torch.int8).view(torch.uint8), "scale": scale.squeeze(-1)}

    def decode(self, plane: Plane, parts: Rows, planes: Planes) -> torch.Tensor:
        """Codes times the group's scale."""
        return (parts["data"].contiguous().view(torch.int8).float() * parts["scale"].float()[..., None]).flatten(-2)


class Q40(Ggml):
    """4 bits."""

    block = (SCALE, NIBBLES)
    kernels = dev.RowKernels(_encode_q4_0, _dequantise_q4_0)

    def encode(self, plane: Plane, rows: torch.Tensor, planes: Planes) -> Rows:
        """The element of the largest magnitude has the code 0."""
        groups = rows.unflatten(-1, (-1, GROUP))
        scale = half_scale(_signed_largest(groups) / -8)
        codes = (_codes(groups, scale) + 8.5).floor().clamp(0, 15)
        return {"data": _packed(codes), "scale": scale.squeeze(-1)}

    def decode(self, plane: Plane, parts: Rows, planes: Planes) -> torch.Tensor:
        """Centred codes times the group's scale."""
        return ((_unpacked(parts["data"]).float() - 8) * parts["scale"].float()[..., None]).flatten(-2)


@triton.jit
def _encode_q5_1(x, parts, place, there, keep, BITS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    worst = dev.largest_magnitude(x, 1)  # a minimum may drop NaN, this does not
    low = dev.nan_like(tl.min(x, axis=1), worst) + 0.0  # -0 becomes 0
    step = tl.div_rn(dev.nan_like(tl.max(x, axis=1), worst) - low, tl.full([ROWS], 31.0, tl.float32))
    codes = dev.number_or((x - low[:, None]) * _reciprocal(step, ROWS)[:, None], 0.0)
    codes = dev.between(tl.floor(codes + 0.5), 0.0, 31.0).to(tl.int32)
    _store_nibbles(dev.pointer(parts[0], place), codes & 15, there, ROWS)
    tl.store(dev.pointer(parts[1], place), dev.half_scale(step), mask=there)
    tl.store(dev.pointer(parts[2], place), dev.half_scale(low), mask=there)
    fifth = tl.sum((codes >> 4) << tl.arange(0, 32)[None, :], axis=1)
    tl.store(dev.pointer(parts[3], place), fifth, mask=there)


@triton.jit
def _dequantise_q5_1(out, parts, WAYS: tl.constexpr, place, live, BITS: tl.constexpr, WIDTH: tl.constexpr):
    scale, low = dev.load_scale(parts[1], WAYS[1], place, live), dev.load_scale(parts[2], WAYS[2], place, live)
    fifth = dev.load_codes(parts[3], WAYS[3], place, live, 1)
    codes = dev.load_codes(parts[0], WAYS[0], place, live, WIDTH // 2)
    bit = tl.arange(0, WIDTH // 2)[None, :]
    first = (codes & 15).to(tl.int32) | (((fifth >> bit) & 1) << 4)
    second = (codes >> 4).to(tl.int32) | (((fifth >> (bit + WIDTH // 2)) & 1) << 4)
    dev.store_halves(out, first.to(tl.float32) * scale + low, second.to(tl.float32) * scale + low, live, WIDTH)


class Q51(Ggml):
    """5 bits between a group's extremes."""

    block = (SCALE, Part("minimum", torch.float16), Part("fifth", torch.int32), NIBBLES)
    kernels = dev.RowKernels(_encode_q5_1, _dequantise_q5_1)
    decode_form = ""

    def encode(self, plane: Plane, rows: torch.Tensor, planes: Planes) -> Rows:
        """The extremes have the codes 0 and 31."""
        groups = rows.unflatten(-1, (-1, GROUP))
        low = groups.amin(dim=-1, keepdim=True) + 0.0  # -0 becomes 0
        step = over(groups.amax(dim=-1, keepdim=True) - low, 31.0)
        codes = ((groups - low) * _one_over(step)).nan_to_num(0.0)
        codes = (codes + 0.5).floor().clamp(0, 31).to(torch.int64)
        fifth = ((codes >> 4) << torch.arange(GROUP, device=codes.device)).sum(dim=-1)
        return {
            "data": _packed(codes & 15), "scale": half_scale(step).squeeze(-1), "fifth": fifth.to(torch.int32),
            "minimum": half_scale(low).squeeze(-1),
        }  # fmt: skip

    def decode(self, plane: Plane, parts: Rows, planes: Planes) -> torch.Tensor:
        """Codes times the group's scale, and its minimum."""
        fifth = parts["fifth"][..., None] >> torch.arange(GROUP, device=parts["fifth"].device) & 1
        codes = _unpacked(parts["data"]) + (fifth << 4)
        return (codes.float() * parts["scale"].float()[..., None] + parts["minimum"].float()[..., None]).flatten(-2)


@triton.jit
def _encode_iq4_nl(x, parts, place, there, keep, BITS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    step = tl.div_rn(_first_largest(x), tl.full([ROWS], -127.0, tl.float32))
    y = dev.number_or(x * _reciprocal(step, ROWS)[:, None], 0.0)
    codes = tl.zeros([ROWS, WIDTH], tl.int32)
    for number in tl.static_range(15):
        codes += (y >= tl.load(parts[3][0] + number)).to(tl.int32)
    value = tl.load(parts[2][0] + codes)
    product = dev.sum_of_columns(x * x * value * x, ROWS, WIDTH)
    square = dev.sum_of_columns(x * x * value * value, ROWS, WIDTH)
    scale = tl.where(square > 0.0, tl.div_rn(product, square), step[:, None])
    _store_nibbles(dev.pointer(parts[0], place), codes, there, ROWS)
    tl.store(dev.pointer(parts[1], place)[:, None], dev.half_scale(scale), mask=there[:, None])


@triton.jit
def _dequantise_iq4_nl(out, parts, WAYS: tl.constexpr, place, live, BITS: tl.constexpr, WIDTH: tl.constexpr):
    scale = dev.load_scale(parts[1], WAYS[1], place, live)
    codes = dev.load_codes(parts[0], WAYS[0], place, live, WIDTH // 2)
    low, high = tl.load(parts[2] + (codes & 15).to(tl.int32)), tl.load(parts[2] + (codes >> 4).to(tl.int32))
    dev.store_halves(out, low * scale, high * scale, live, WIDTH)


LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What a code of iq4_nl stands for, in units of the scale."""


@lru_cache(maxsize=8)
def levels(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """float32: LEVELS [16], and the middles between two of them [15], where the nearest one changes."""
    table = torch.tensor(LEVELS, dtype=torch.float32, device=device)
    return table, (table[1:] + table[:-1]) / 2


class Iq4Nl(Ggml):
    """4 bits, each a level of a table."""

    block = (SCALE, NIBBLES)
    kernels = dev.RowKernels(_encode_iq4_nl, _dequantise_iq4_nl)
    decode_form = ""

    def warm(self, head_dim: int, device: torch.device) -> None:
        """The levels."""
        levels(device)

    def kernel_parts(self, plane: Plane, planes: Planes) -> tuple[torch.Tensor, ...]:
        """And the levels."""
        return *super().kernel_parts(plane, planes), *levels(planes.device)

    def encode(self, plane: Plane, rows: torch.Tensor, planes: Planes) -> Rows:
        """The element of the largest magnitude decides the codes, all of them the scale."""
        groups = rows.unflatten(-1, (-1, GROUP))
        table, middles = levels(rows.device)
        step = over(_signed_largest(groups), -127.0)
        codes = torch.bucketize((groups * _one_over(step)).nan_to_num(0.0).contiguous(), middles, right=True)
        value = table[codes]
        product = folded_sum(groups * groups * value * groups, -1)
        square = folded_sum(groups * groups * value * value, -1)
        scale = torch.where(square > 0, product / square, step)
        return {"data": _packed(codes), "scale": half_scale(scale).squeeze(-1)}

    def decode(self, plane: Plane, parts: Rows, planes: Planes) -> torch.Tensor:
        """Levels times the group's scale."""
        return (levels(planes.device)[0][_unpacked(parts["data"]).long()] * parts["scale"].float()[..., None]).flatten(
            -2
        )


CODECS = {"q8_0": Q80, "q4_0": Q40, "q5_1": Q51, "iq4_nl": Iq4Nl}
