"""Which codes a plane holds, and the numbers that they stand for: the arithmetic of `realkernels/formats/`, in fp32.

Each product of a code and a scale is exact in fp32 or rounded once, as the formats' own `read` rounds it, so that a
kernel's numbers are those of `read`, rounded to the type of the rows.
"""

import triton
import triton.language as tl

from realkernels.expand.piece import half_numbers

INT8: tl.constexpr = tl.constexpr(0)
"""code x scale"""
E4M3: tl.constexpr = tl.constexpr(1)
CELLS8: tl.constexpr = tl.constexpr(2)
"""exl3: middles of 256 cells of [-scale, scale]"""
NIBBLES: tl.constexpr = tl.constexpr(3)
"""From this kind on a byte holds two codes."""
CELLS4: tl.constexpr = tl.constexpr(3)
INT4: tl.constexpr = tl.constexpr(4)
"""(code - zero) x scale, the zero in the 4 low bits of the scale"""
CENTRED: tl.constexpr = tl.constexpr(5)
"""q4_0: (code - 8) x scale, element j + half of the group in the byte of element j"""
CENTROIDS: tl.constexpr = tl.constexpr(6)
"""table[code] x scale"""
AFFINE: tl.constexpr = tl.constexpr(7)
"""code x scale + zero"""


@triton.jit
def numbers(codes, scale, zero, table, KIND: tl.constexpr):
    """FP32 of codes (uint8 [ROWS, N]); scale and zero [ROWS, 1] as they lie; table holds 16 centroids."""
    if KIND == E4M3:
        x = half_numbers(codes) * scale
    elif KIND == INT8:
        x = codes.to(tl.int8, bitcast=True).to(tl.float32) * scale
    elif KIND == INT4:
        marked = scale.to(tl.int32, bitcast=True)
        x = (codes.to(tl.int32) - (marked & 15)).to(tl.float32) * (marked & -16).to(tl.float32, bitcast=True)
    elif KIND == CENTRED:
        x = (codes.to(tl.float32) - 8.0) * scale
    elif KIND == CELLS4:
        x = ((2.0 * codes.to(tl.float32) + 1.0) / 16.0 - 1.0) * scale
    elif KIND == CELLS8:
        x = ((2.0 * codes.to(tl.float32) + 1.0) / 256.0 - 1.0) * scale
    elif KIND == CENTROIDS:
        x = tl.load(table + codes.to(tl.int32)) * scale
    else:
        x = codes.to(tl.float32) * scale + zero
    return x
