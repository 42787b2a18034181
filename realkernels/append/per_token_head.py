"""New tokens into caches with a float32 scale for each token and head: int8, fp8, and int4 after a rotation."""

import triton
import triton.language as tl

from realkernels.append.folds import hadamard
from realkernels.append.numbers import (
    between,
    e4m3_bits,
    finite_or_nan,
    half_away_from_zero,
    largest_magnitude,
    nan_like,
    nearest_even,
    number_or,
)  # fmt: skip
from realkernels.append.packing import store_codes
from realkernels.append.places import load_rows, page_and_offset, place
from realkernels.kernels.stable_keys import stable_keys

LEAST_SCALE = tl.constexpr(1e-6)


@triton.jit
def _int4(x, signs, BLOCK: tl.constexpr, DIM: tl.constexpr):
    """Codes [BLOCK, DIM] and the scale that hides a zero point [BLOCK] of rows that are not rotated yet."""
    x = hadamard(x * tl.load(signs + tl.arange(0, DIM))[None, :], BLOCK, DIM)
    lost = largest_magnitude(x, 1)  # a minimum may drop NaN, this does not
    low, high = tl.minimum(tl.min(x, axis=1), 0.0), tl.maximum(tl.max(x, axis=1), 0.0)
    scale = finite_or_nan(_at_least(tl.div_rn(nan_like(high - low, lost), tl.full([BLOCK], 15.0, tl.float32))))
    bits = scale.to(tl.int32, bitcast=True) & -16
    scale = bits.to(tl.float32, bitcast=True)
    zero = between(nearest_even(number_or(tl.div_rn(-low, scale), 0.0)), 0.0, 15.0)
    codes = number_or(tl.div_rn(x, scale[:, None]) + zero[:, None], 0.0)
    codes = between(nearest_even(codes), 0.0, 15.0).to(tl.int32)
    return codes, (bits | zero.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def _at_least(scale):
    """LEAST_SCALE or more; NaN stays NaN."""
    return tl.where(scale < LEAST_SCALE, LEAST_SCALE, scale)


@triton.jit
def _write(x, data, scales, signs, slots, tokens, there, head, PAGE: tl.constexpr, DIM: tl.constexpr,
           WIDTH: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    page, offset = page_and_offset(slots, tokens, there, PAGE)
    lane = tl.arange(0, WIDTH)[None, :]
    keep = there[:, None] & (lane < DIM)
    x = load_rows(x, tokens, head, keep, WIDTH)
    if KIND == "int4":
        codes, scale = _int4(x, signs, BLOCK, DIM)
    else:
        largest = tl.full([BLOCK], 127.0 if KIND == "int8" else 448.0, tl.float32)
        scale = finite_or_nan(_at_least(tl.div_rn(largest_magnitude(x, 1), largest)))
        codes = number_or(tl.div_rn(x, scale[:, None]), 0.0)
        if KIND == "int8":  # noqa: SIM108 - a branch of the compiler's
            codes = between(half_away_from_zero(codes), -127.0, 127.0).to(tl.int32)
        else:
            codes = e4m3_bits(codes)
    tl.store(place(scales, page, head, offset), scale, mask=there)
    at = place(data, page, head, offset)[:, None]
    store_codes(at, codes, keep, BLOCK, WIDTH, 4 if KIND == "int4" else 8)


@triton.jit(do_not_specialize=["count"])
def append_per_token_head(
    keys, values, slots, key_data, value_data, key_scale, value_scale, signs, count, PAGE: tl.constexpr,
    DIM: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of BLOCK tokens, heads, 2 for K and V); KIND int8, fp8 or int4, which alone reads signs [DIM]."""
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there, head = tokens < count, tl.program_id(1)
    if tl.program_id(2) == 0:
        _write(keys, key_data, key_scale, signs, slots, tokens, there, head, PAGE, DIM, WIDTH, KIND, BLOCK)
    else:
        _write(values, value_data, value_scale, signs, slots, tokens, there, head, PAGE, DIM, WIDTH, KIND, BLOCK)


stable_keys(globals())
