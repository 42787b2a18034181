"""New tokens into caches with a float16 scale for each group of 32 elements: q8_0, q4_0 and exl3 in 2 to 8 bits.

A program quantises BLOCK groups, one behind the other over tokens, heads and the groups of a head.
"""

import triton
import triton.language as tl

from realkernels.append.folds import hadamard
from realkernels.append.numbers import (
    between,
    finite_or_zero,
    half_scale,
    largest_magnitude,
    magnitude_bits,
    nearest_even,
    number_or,
)  # fmt: skip
from realkernels.append.packing import store_words
from realkernels.append.places import page_and_offset, place

ROOT = tl.constexpr(0.17677669529663687)
"""1 / sqrt(32)."""


@triton.jit
def _signed_largest(x):
    """The first element of the largest magnitude with its sign, of float32 [rows, 32]."""
    bits = magnitude_bits(x)
    lane = tl.arange(0, 32)[None, :]
    first = tl.min(tl.where(bits == tl.max(bits, axis=1)[:, None], lane, 32), axis=1)
    chosen = tl.where(lane == first[:, None], x.to(tl.int32, bitcast=True), 0)
    return tl.sum(chosen, axis=1).to(tl.float32, bitcast=True)


@triton.jit
def _write(x, data, scales, slots, groups, count, GROUP_STEP, SCALE_STEP, PAGE: tl.constexpr, HEADS: tl.constexpr,
           GROUPS: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    token, there = groups // (HEADS * GROUPS), groups < count * (HEADS * GROUPS)
    head, group = groups // GROUPS % HEADS, groups % GROUPS
    page, offset = page_and_offset(slots, token, there, PAGE)
    lane = tl.arange(0, 32)
    from_ = x[0] + token.to(tl.int64) * x[1] + head * x[2] + group * 32
    x = tl.load(from_[:, None] + lane[None, :], mask=there[:, None], other=0.0).to(tl.float32)
    at = place(data, page, head, offset) + group * GROUP_STEP
    if KIND == "exl3":
        x = hadamard(x, BLOCK, 32) * ROOT
        scale = half_scale(largest_magnitude(x, 1))
        cells = (tl.div_rn(x, scale.to(tl.float32)[:, None]) + 1.0) * (1 << (BITS - 1))
        codes = between(tl.floor(number_or(cells, 0.0)), 0.0, (1 << BITS) - 1.0).to(tl.int32)
        store_words(at, codes, there, BITS)
    elif KIND == "q8_0":
        scale = half_scale(tl.div_rn(largest_magnitude(x, 1), tl.full([BLOCK], 127.0, tl.float32)))
        codes = finite_or_zero(tl.div_rn(x, scale.to(tl.float32)[:, None]))
        codes = between(nearest_even(codes), -127.0, 127.0).to(tl.int32)
        tl.store(at[:, None] + lane[None, :], codes.to(tl.uint8), mask=there[:, None])
    else:
        scale = half_scale(_signed_largest(x) * -0.125)
        codes = finite_or_zero(tl.div_rn(x, scale.to(tl.float32)[:, None]))
        codes = between(tl.floor(codes + 8.5), 0.0, 15.0).to(tl.int32)
        halves = tl.reshape(codes << (lane // 16 * 4)[None, :], [BLOCK, 2, 16])  # element j + 16 in the high nibble
        tl.store(at[:, None] + tl.arange(0, 16)[None, :], tl.sum(halves, axis=1).to(tl.uint8), mask=there[:, None])
    tl.store(place(scales, page, head, offset) + group * SCALE_STEP, scale, mask=there)


@triton.jit(do_not_specialize=["count"])
def append_groups(
    keys, values, slots, key_data, value_data, key_scale, value_scale, count, key_steps, value_steps,
    PAGE: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr, KIND: tl.constexpr, KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of BLOCK groups, 2 for K and V); KIND q8_0, q4_0 or exl3, whose data are int32 words.

    `key_steps` and `value_steps`: from a group to the next, in elements of data and of scales.
    """
    groups = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if tl.program_id(1) == 0:
        _write(keys, key_data, key_scale, slots, groups, count, key_steps[0], key_steps[1], PAGE, HEADS, GROUPS, KIND,
               KEY_BITS, BLOCK)  # fmt: skip
    else:
        _write(values, value_data, value_scale, slots, groups, count, value_steps[0], value_steps[1], PAGE, HEADS,
               GROUPS, KIND, VALUE_BITS, BLOCK)  # fmt: skip
