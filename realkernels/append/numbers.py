"""Numbers as `realkernels/formats` rounds them, bit by bit, in Triton: no approximate division, root or conversion.

Whoever launches a kernel that uses these gives `enable_fp_fusion=False`: a product and a sum are two roundings there.
"""

import triton
import triton.language as tl

from realkernels.kernels.stable_keys import stable_keys

NAN_32 = tl.constexpr(0x7FC00000)
INFINITE_32 = tl.constexpr(0x7F800000)
"""Bits of float32; a magnitude's bits from here on are infinity and NaN."""

WHOLE = tl.constexpr(12582912.0)
"""1.5 x 2^23: added and taken off, it rounds what is below 2^22 to whole numbers, half to even."""


@triton.jit
def magnitude_bits(x):
    """Bits of |x|, int32, ordered as the magnitudes are with infinity and NaN above all."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def largest_magnitude(x, AXIS: tl.constexpr):
    """Of float32 along an axis; NaN where there is one."""
    return tl.max(magnitude_bits(x), axis=AXIS).to(tl.float32, bitcast=True)


@triton.jit
def nearest_even(x):
    """The nearest whole number, half to even; what lies beyond 2^22 stays about where it is."""
    return (x + WHOLE) - WHOLE


@triton.jit
def half_away_from_zero(x):
    """The nearest whole number; of two as near, the larger in magnitude."""
    size = tl.abs(x)
    whole = tl.floor(size)
    whole = tl.where(size - whole >= 0.5, whole + 1.0, whole)
    return tl.where(x < 0, -whole, whole)


@triton.jit
def number_or(x, other):
    """x, and `other` where it is NaN."""
    return tl.where(x == x, x, other)  # noqa: PLR0124


@triton.jit
def nan_like(x, other):
    """x, and NaN where `other` is: a least or largest element may be found past one."""
    return tl.where(other == other, x, other)  # noqa: PLR0124


@triton.jit
def finite_or_zero(x):
    """x, and 0 where it is NaN or infinite."""
    return tl.where(magnitude_bits(x) < INFINITE_32, x, 0.0)


@triton.jit
def finite_or_nan(x):
    """float32 x, and the one NaN where it is not finite."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(magnitude_bits(x) < INFINITE_32, bits, NAN_32).to(tl.float32, bitcast=True)


@triton.jit
def half_scale(x):
    """float16 of float32, and the one NaN where it is not finite there."""
    half = x.to(tl.float16)
    bits = half.to(tl.int16, bitcast=True)
    return tl.where((bits & 0x7FFF) < 0x7C00, bits, 0x7E00).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def between(x, low, high):
    """Clamped; NaN stays NaN."""
    return tl.where(x > high, high, tl.where(x < low, low, x))


@triton.jit
def affine_codes(x, scale, zero, BITS: tl.constexpr):
    """Nearest code, int32 of 0 to 2^BITS - 1, for x = code scale + zero; 0 where that is no number."""
    q = nearest_even(finite_or_zero(tl.div_rn(x - zero, scale)))
    return between(q, 0.0, (1 << BITS) - 1.0).to(tl.int32)


@triton.jit
def e4m3_bits(x):
    """float8_e4m3fn of float32 as int32: half to even, saturating at 448; NaN keeps its sign."""
    x = between(x, -448.0, 448.0)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    bits = magnitude_bits(x)
    lifted = bits.to(tl.float32, bitcast=True) + 16384.0  # 2^14: subnormal codes are its last mantissa bits
    small = lifted.to(tl.int32, bitcast=True) - 0x46800000
    normal = (bits - (120 << 23) + 0x7FFFF + ((bits >> 20) & 1)) >> 20
    code = tl.where(bits < (121 << 23), small, normal)
    return tl.where(bits > INFINITE_32, 0x7F, code) | sign


@triton.jit
def bfloat16(x, DEVICE: tl.constexpr):
    """Of float32, half to even; the interpreter would cut bits off."""
    if DEVICE:
        y = x.to(tl.bfloat16)
    else:
        bits = x.to(tl.int32, bitcast=True)
        bits = tl.where(magnitude_bits(x) <= INFINITE_32, bits + 0x7FFF + ((bits >> 16) & 1), NAN_32)
        y = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return y


stable_keys(globals())
