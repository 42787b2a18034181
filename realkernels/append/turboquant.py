"""New tokens into TurboQuant's caches: K as centroids of its direction or as e4m3, V between its extremes."""

import triton
import triton.language as tl

from realkernels.append.folds import hadamard, sum_of_columns
from realkernels.append.numbers import affine_codes, e4m3_bits, half_scale, largest_magnitude, nan_like, number_or
from realkernels.append.packing import store_codes
from realkernels.append.places import load_rows, page_and_offset, place
from realkernels.kernels.stable_keys import stable_keys


@triton.jit
def _lengths(x, BLOCK: tl.constexpr, DIM: tl.constexpr):
    """[BLOCK, 1]: Euclidean."""
    return tl.sqrt_rn(sum_of_columns(x * x, BLOCK, DIM))


@triton.jit
def _key(x, data, norm, table, middles, root, page, head, offset, there, keep, DIM: tl.constexpr, WIDTH: tl.constexpr,
         BITS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    at = place(data, page, head, offset)[:, None]
    if BITS == 8:
        codes = e4m3_bits(x)
    else:
        length = _lengths(x, BLOCK, DIM)
        direction = number_or(hadamard(tl.div_rn(x, length), BLOCK, DIM) * root, 0.0)
        codes = tl.zeros([BLOCK, WIDTH], tl.int32)
        for number in tl.static_range((1 << BITS) - 1):
            codes += (direction > tl.load(middles + number)).to(tl.int32)
        factor = tl.div_rn(length, _lengths(tl.load(table + codes), BLOCK, DIM))
        tl.store(place(norm, page, head, offset)[:, None], half_scale(factor), mask=there[:, None])
    store_codes(at, codes, keep, BLOCK, WIDTH, BITS)


@triton.jit
def _value(x, data, scales, zeros, page, head, offset, there, keep, WIDTH: tl.constexpr, BITS: tl.constexpr,
           BLOCK: tl.constexpr):  # fmt: skip
    worst = largest_magnitude(x, 1)
    low, high = tl.min(tl.where(keep, x, float("inf")), axis=1), tl.max(tl.where(keep, x, float("-inf")), axis=1)
    low, high = nan_like(low, worst), nan_like(high, worst)
    scale = half_scale(tl.div_rn(high - low, tl.full([BLOCK], (1 << BITS) - 1.0, tl.float32)))
    zero = half_scale(low)
    codes = affine_codes(x, scale.to(tl.float32)[:, None], zero.to(tl.float32)[:, None], BITS)
    tl.store(place(scales, page, head, offset), scale, mask=there)
    tl.store(place(zeros, page, head, offset), zero, mask=there)
    store_codes(place(data, page, head, offset)[:, None], codes, keep, BLOCK, WIDTH, BITS)


@triton.jit(do_not_specialize=["count"])
def append_turboquant(
    keys, values, slots, key_data, value_data, key_norm, value_scale, value_zero, table, middles, root, count,
    PAGE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of BLOCK tokens, heads, 2 for K and V).

    `table` and `middles`: centroids and what lies between them, `root` 1 / sqrt(DIM); not read with keys in 8 bits.
    """
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there, head = tokens < count, tl.program_id(1)
    page, offset = page_and_offset(slots, tokens, there, PAGE)
    keep = there[:, None] & (tl.arange(0, WIDTH)[None, :] < DIM)
    if tl.program_id(2) == 0:
        x = load_rows(keys, tokens, head, keep, WIDTH)
        _key(x, key_data, key_norm, table, middles, root, page, head, offset, there, keep, DIM, WIDTH, KEY_BITS, BLOCK)
    else:
        x = load_rows(values, tokens, head, keep, WIDTH)
        _value(x, value_data, value_scale, value_zero, page, head, offset, there, keep, WIDTH, VALUE_BITS, BLOCK)


stable_keys(globals())
