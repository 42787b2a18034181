"""How a gather dequantises the interleaved blocks of each codec in registers: what is the codec's own in that kernel.

A byte of codes holds DIM // WIDTH elements of a head, its parts, from the low bits on. A codec says what a part is
worth in units of its scale, what the stored scale multiplies by, and which element of the head a part is.
"""
# ruff: noqa: ARG001 - all functions of a kind take the same

from typing import Any, NamedTuple

import triton
import triton.language as tl


@triton.jit
def _stored_factor(scale):
    """What a stored scale multiplies by, float32."""
    return scale.to(tl.float32)


@triton.jit
def _int8_numbers(codes, scale, part):
    """Part `part` of bytes codes [TILE, WIDTH] in units of its scale, float32; scale [TILE] as it is stored."""
    return codes.to(tl.int8, bitcast=True).to(tl.float32)


@triton.jit
def _int4_numbers(codes, scale, part):
    """As `_int8_numbers`, with a zero point in the low bits of the scale."""
    x = ((codes >> (4 * part)) & 15).to(tl.float32)
    x -= (scale.to(tl.int32, bitcast=True) & 15).to(tl.float32)[:, None]
    return x


@triton.jit
def _int4_factor(scale):
    """As `_stored_factor`, without the zero point."""
    return (scale.to(tl.int32, bitcast=True) & -16).to(tl.float32, bitcast=True)


@triton.jit
def _q4_0_numbers(codes, scale, part):
    """As `_int8_numbers`."""
    x = ((codes >> (4 * part)) & 15).to(tl.float32)
    x -= 8.0
    return x


@triton.jit
def _exl3_numbers(codes, scale, part):
    """As `_int8_numbers`."""
    x = ((codes >> (4 * part)) & 15).to(tl.float32)
    return x * 0.125 - 0.9375


@triton.jit
def _neighbours(byte, part, PARTS: tl.constexpr):
    """Element of the head that part `part` of byte `byte` is: the parts of a byte are neighbours."""
    return PARTS * byte + part


@triton.jit
def _halves_of_32(byte, part, PARTS: tl.constexpr):
    """As `_neighbours`: of 32 elements the first half lies in the low bits of 16 bytes, the second in the high bits."""
    return byte // 16 * 32 + byte % 16 + 16 * part


class InterleavedCodec(NamedTuple):
    """Triton functions of one codec; each is compiled into the gather."""

    numbers: Any
    """(codes [TILE, WIDTH], scale as stored, part) -> float32 [TILE, WIDTH] in units of the scale."""
    factor: Any = _stored_factor
    """(scale as stored) -> what it multiplies by, float32."""
    element: Any = _neighbours
    """(byte, part, PARTS) -> element of the head."""


INTERLEAVED = {
    "int8_per_token_head": InterleavedCodec(_int8_numbers),
    "q8_0": InterleavedCodec(_int8_numbers),
    "int4_per_token_head": InterleavedCodec(_int4_numbers, factor=_int4_factor),
    "q4_0": InterleavedCodec(_q4_0_numbers, element=_halves_of_32),
    "exl3_k4v4": InterleavedCodec(_exl3_numbers),
}
