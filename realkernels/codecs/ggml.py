"""llama.cpp's q8_0 and q4_0 as a cache: groups of 32 elements of a head with a float16 scale.

| bytes of a group, inline | q8_0 | q4_0 |
|---|---|---|
| 0 .. 1 | scale, float16 | scale, float16 |
| 2 .. | 32 codes, two's complement | 16 bytes: element j in the low nibble of byte j, element j + 16 in the high one |
| a group | 34 B | 18 B |

inline: key_blocks and value_blocks uint8 [page, token, head, D / 32, 34 or 18]. aligned: codes and scales in planes of
their own, page, head, token, group; the same bytes. Source: llama.cpp `ggml-common.h` (block sizes 2 + 32 and 2 + 16
B).

q8_0: scale = absmax / 127, code = round(x / scale), x = code x scale. q4_0: scale = m / -8 where m is the first element
of the largest magnitude with its sign; code = floor(x / scale + 8.5) in 0 .. 15, x = (code - 8) x scale: what lies as
far as m on the other side loses up to a whole scale. Codes are found with the scale as it is stored, in float16.

A group that holds NaN or infinity, or whose scale exceeds 65,504, has the scale NaN: those 32 elements of that token
only.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from realkernels.codecs import on_device as dev
from realkernels.codecs.arithmetic import half_scale, over
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


@dataclass(frozen=True, kw_only=True)
class Ggml(RowCodec):
    """A scale and codes for each 32 elements."""

    arrangements: ClassVar[tuple[Arrangement, ...]] = ("inline", "aligned")
    group: ClassVar[int] = GROUP
    decode_form: ClassVar[str] = "groups"
    code_bytes: ClassVar[int]
    """Of the codes of a group."""

    def check(self, head_dim: int) -> None:
        """Whole groups."""
        check_multiple(self.name, head_dim, GROUP)

    def published(self, head_dim: int) -> tuple[PartLayout, ...]:
        """A tensor of blocks for K and one for V; page, token, head, group."""
        return tuple(
            PartLayout(
                f"{plane}_blocks",
                (Part(f"{plane}_scale", torch.float16), Part(f"{plane}_data", torch.uint8, (self.code_bytes,))),
                (head_dim // GROUP,),
            )
            for plane in PLANES
        )


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
def _signed_largest(x):
    """The first element of the largest magnitude with its sign, of float32 [ROWS, 32]."""
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
    scale = dev.half_scale(_signed_largest(x) * -0.125)
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

    code_bytes = GROUP
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

    code_bytes = HALF
    kernels = dev.RowKernels(_encode_q4_0, _dequantise_q4_0)

    def encode(self, plane: Plane, rows: torch.Tensor, planes: Planes) -> Rows:
        """The element of the largest magnitude has the code 0."""
        groups = rows.unflatten(-1, (-1, GROUP))
        scale = half_scale(groups.gather(-1, groups.abs().argmax(dim=-1, keepdim=True)) / -8)
        codes = (_codes(groups, scale) + 8.5).floor().clamp(0, 15)
        return {"data": _packed(codes), "scale": scale.squeeze(-1)}

    def decode(self, plane: Plane, parts: Rows, planes: Planes) -> torch.Tensor:
        """Centred codes times the group's scale."""
        return ((_unpacked(parts["data"]).float() - 8) * parts["scale"].float()[..., None]).flatten(-2)


CODECS = {"q8_0": Q80, "q4_0": Q40}
