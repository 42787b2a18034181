"""Triton arithmetic that codecs share: numbers rounded, packed and added up bit by bit as their torch references do.

No approximate division, root or conversion, and sums by halves as in `arithmetic.py`. Whoever launches a kernel that
encodes gives `enable_fp_fusion=False`: a product and a sum are two roundings there.

A *part* is one view [page, head, token(, group), ...] of a cache, of codes or of scales. Encoding takes it as a tuple
(view, strides of page, head, token(, group)) in elements. Dequantising takes the first element of its storage and, as
compile-time numbers, the offset and the same strides: a compiler that knows them knows how wide it may load, which the
address of a view tells only where it is a multiple of 16 B. A *place* is (page, head, offset in the page, group).
"""

from typing import Any, NamedTuple

import torch

from realkernels.jit import INTERPRETED, stable_keys, tl, triton

NAN_32 = tl.constexpr(0x7FC00000)
INFINITE_32 = tl.constexpr(0x7F800000)
"""Bits of float32; a magnitude's bits from here on are infinity and NaN."""

WHOLE = tl.constexpr(12582912.0)
"""1.5 x 2^23: added and taken off, it rounds what is below 2^22 to whole numbers, half to even."""


class RowKernels(NamedTuple):
    """The Triton functions of a plane whose tokens are quantised on their own.

    `encode(x, parts, place, there, keep, BITS, ROWS, WIDTH)` takes float32 x [ROWS, WIDTH], heads of tokens or groups
    of heads; `there` [ROWS] says which rows there are, `keep` which of their elements: [ROWS, WIDTH], or [ROWS, 1] for
    groups, which are whole. `dequantise(out, parts, WAYS, place, live, BITS, WIDTH)` stores numbers of the stored
    basis behind the pointers out [ROWS, 1] of the rows that are `live` [ROWS].
    """

    encode: Any
    dequantise: Any
    """None where no kernel does."""
    bits: int = 8
    most_tokens: int = 32
    """That a thread block dequantises of a page."""


@triton.jit
def stored_factor(scale):
    """What a stored scale multiplies by, float32."""
    return scale.to(tl.float32)


@triton.jit
def byte_numbers(codes, scale, part):
    """int8 codes as float32."""
    return codes.to(tl.int8, bitcast=True).to(tl.float32)


@triton.jit
def neighbours(byte, part, PARTS: tl.constexpr):
    """Element of the head that part `part` of byte `byte` is: the parts of a byte are neighbours."""
    return PARTS * byte + part


@triton.jit
def halves_of_32(byte, part, PARTS: tl.constexpr):
    """As `neighbours`: of 32 elements the first half lies in the low bits of 16 bytes, the second in the high bits."""
    return byte // 16 * 32 + byte % 16 + 16 * part


class InterleavedKernels(NamedTuple):
    """The Triton functions by which a gather dequantises a codec's interleaved blocks in registers.

    A byte of codes holds head_dim / bytes of a head's codes elements, its parts, from the low bits on.
    """

    numbers: Any
    """(codes uint8 [TILE, WIDTH], scale as stored [TILE] or [TILE, groups], part) -> float32 [TILE, WIDTH] in units of
    the scale. Of a codec with minima and fifth bits the scale is the fifth bits' word of each byte's group."""
    factor: Any = stored_factor
    """(scale as stored) -> what it multiplies by, float32."""
    element: Any = neighbours
    """(byte, part, parts) -> element of the head."""


def strided(view: torch.Tensor, axes: int) -> tuple[torch.Tensor | int, ...]:
    """A part as `encode` takes it: with the strides of its first `axes` axes; a table of one axis as it is."""
    return (view, *view.stride()[:axes]) if view.dim() >= axes else (view,)


def rows_and_steps(x: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """K or V [tokens, heads, elements] as kernels take it: with the strides of a token and of a head."""
    return x, x.stride(0), x.stride(1)


FEW_TOKENS = 64
"""Up to so many tokens a thread block takes one; a block of 8 beyond."""

INTERPRETED_ROWS = 64
"""Rows of the interpreter's blocks at the most: it takes the time of an operation, not of an element."""


def tokens_of_a_block(tokens: int, device: torch.device, *, few: int = FEW_TOKENS, block: int = 8) -> int:
    """Tokens (or groups) that a thread block encodes."""
    if device.type == "cpu":
        return min(INTERPRETED_ROWS, triton.next_power_of_2(tokens))
    return 1 if tokens <= few else block


def warps(elements: int, *, most: int) -> int:
    """Of a thread block: one for each 512 elements."""
    return max(1, min(most, elements // 512))


@triton.constexpr_function
def log2(size):
    """Of a power of two."""
    return size.bit_length() - 1


@triton.constexpr_function
def one_over_root(size):
    """Brings a Hadamard product of this size back to the length that it came with."""
    return 1 / size**0.5


# Places and rows


@triton.jit
def pointer(part, place):
    """Pointers to a place's first elements of a part (view, strides)."""
    at = part[0] + place[0] * part[1] + place[1] * part[2] + place[2] * part[3]
    if len(part) > 4:
        at += place[3] * part[4]
    return at


@triton.jit
def load_rows(x, token, head, keep, WIDTH: tl.constexpr):
    """float32 [tokens, WIDTH] of one head of x (tensor, strides of token and head), 0 where not `keep`."""
    at = x[0] + token.to(tl.int64)[:, None] * x[1] + head * x[2] + tl.arange(0, WIDTH)[None, :]
    return tl.load(at, mask=keep, other=0.0).to(tl.float32)


@triton.jit
def load_codes(parts, WAYS: tl.constexpr, AT: tl.constexpr, place, live, SIZE: tl.constexpr):
    """[ROWS, SIZE] elements of each place of part number AT (storage, and in WAYS its offset and strides)."""
    WAY: tl.constexpr = WAYS[AT]
    at = WAY[0] + place[0] * WAY[1] + place[1] * WAY[2] + place[2] * WAY[3]
    if len(WAY) > 4:
        at += place[3] * WAY[4]
    return tl.load(parts[AT] + at[:, None] + tl.arange(0, SIZE)[None, :], mask=live[:, None], other=0)


@triton.jit
def load_scale(parts, WAYS: tl.constexpr, AT: tl.constexpr, place, live):
    """[ROWS, 1]: one element of each place of part number AT, float16 as float32."""
    WAY: tl.constexpr = WAYS[AT]
    at = WAY[0] + place[0] * WAY[1] + place[1] * WAY[2] + place[2] * WAY[3]
    if len(WAY) > 4:
        at += place[3] * WAY[4]
    scale = tl.load(parts[AT] + at, mask=live, other=0.0)[:, None]
    if scale.dtype == tl.float16:
        scale = scale.to(tl.float32)
    return scale


@triton.jit
def store_row(out, x, live, WIDTH: tl.constexpr):
    """Rows x [ROWS, WIDTH], rounded to the type of `out`."""
    tl.store(out + tl.arange(0, WIDTH)[None, :], x.to(out.dtype.element_ty), mask=live[:, None])


@triton.jit
def store_pairs(out, low, high, live, WIDTH: tl.constexpr):
    """Elements of `low` and `high` [ROWS, WIDTH / 2] in turn."""
    low, high = low.to(out.dtype.element_ty), high.to(out.dtype.element_ty)
    both = tl.join(low, high).reshape(low.shape[0], WIDTH)
    tl.store(out + tl.arange(0, WIDTH)[None, :], both, mask=live[:, None])


@triton.jit
def store_halves(out, low, high, live, WIDTH: tl.constexpr):
    """`low` [ROWS, WIDTH / 2] and behind it `high`: two stores, since joining them would move numbers about."""
    column = tl.arange(0, WIDTH // 2)[None, :]
    low, high = low.to(out.dtype.element_ty), high.to(out.dtype.element_ty)
    tl.store(out + column, low, mask=live[:, None])
    tl.store(out + column + WIDTH // 2, high, mask=live[:, None])


# Sums in the reference's order


@triton.jit
def hadamard(x, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Rows x [ROWS, SIZE] times Sylvester's matrix over the last axis, not normalised.

    A step adds and subtracts neighbours and moves the lowest bit of the index to the top, so that the next step finds
    the next bit lowest; after the last one everything is where it was.
    """
    for _ in tl.static_range(log2(SIZE)):
        first, second = tl.split(tl.reshape(x, [ROWS, SIZE // 2, 2]))
        both = tl.join(first + second, first - second)
        x = tl.reshape(tl.permute(both, [0, 2, 1]), [ROWS, SIZE])
    return x


@triton.jit
def sum_of_columns(x, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """[ROWS, 1]: x [ROWS, SIZE] along its last axis."""
    for step in tl.static_range(log2(SIZE)):
        low, high = tl.split(tl.permute(tl.reshape(x, [ROWS, 2, SIZE >> (step + 1)]), [0, 2, 1]))
        x = low + high
    return x


# Rounding


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
def e4m3_numbers(bits):
    """float32 of e4m3 bits in uint8: a float16 has the same bits one place higher, and a bias of 8 more."""
    low = bits.to(tl.int16) & 127
    half = (((bits.to(tl.int16) & 128) << 8) | (low << 7)).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.where(low == 127, float("nan"), half.to(tl.float32) * 256.0)


@triton.jit
def bfloat16(x):
    """Of float32, half to even; the interpreter would cut bits off."""
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        bits = tl.where(magnitude_bits(x) <= INFINITE_32, bits + 0x7FFF + ((bits >> 16) & 1), NAN_32)
        y = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        y = x.to(tl.bfloat16)
    return y


# Packing


@triton.jit
def store_codes(at, codes, keep, ROWS: tl.constexpr, SIZE: tl.constexpr, BITS: tl.constexpr):
    """Codes int32 [ROWS, SIZE] of 2, 3, 4 or 8 bits as little-endian streams behind the byte pointers `at` [ROWS, 1].

    Of a row are kept, where `keep` [ROWS, SIZE], its first codes, whole bytes of them (8 codes together of 3 bits).
    """
    if BITS == 8:
        tl.store(at + tl.arange(0, SIZE)[None, :], codes.to(tl.uint8), mask=keep)
    else:
        TOGETHER: tl.constexpr = 8 if BITS == 3 else 8 // BITS
        RUNS: tl.constexpr = SIZE // TOGETHER
        place = tl.arange(0, SIZE) % TOGETHER * BITS
        runs = tl.sum(tl.reshape(codes << place[None, :], [ROWS, RUNS, TOGETHER]), axis=2)
        kept = tl.max(tl.reshape(keep.to(tl.int32), [ROWS, RUNS, TOGETHER]), axis=2) != 0
        BYTES: tl.constexpr = TOGETHER * BITS // 8
        for byte in tl.static_range(BYTES):
            part = (runs >> (8 * byte)) & 0xFF
            tl.store(at + (tl.arange(0, RUNS) * BYTES + byte)[None, :], part.to(tl.uint8), mask=kept)


stable_keys(globals())
