"""Decode attention over caches with a scale per token and head: int4, int8 and fp8; and fp8 with one scale a layer."""

import triton
import triton.language as tl

from realkernels.codecs.decode.form import DecodeForm
from realkernels.codecs.decode.word_plans import plan_columns, plan_small, plan_wide, wide_is_less
from realkernels.kernels.arithmetic import centred_code, fp8_halves, int8_halves, tiny_code
from realkernels.kernels.decode_scaled import ScaledCodec, attend_scaled
from realkernels.kernels.decode_words import Codes, WordCodec, attend_words
from realkernels.kernels.split_kv import PROLOGUE_TILES, PlanCase, TilePlan
from realkernels.kernels.stable_keys import stable_keys

# int4: k = (code - zero) scale, so that s = scale (q . code - zero sum(q)). Values: codes less 7.5, since a large sum
# would drown a small output, and sum(p v_scale (zero - 7.5)) is taken off at the end. No element is multiplied: a code
# costs a mask, half a shift, of V a subtraction. Zero points are in the low four bits of the scales.

CENTRE: tl.constexpr = tl.constexpr(7.5)
"""Taken off every code of V before its product."""


@triton.jit
def _tiny(w, _scale, number: tl.constexpr, ASM: tl.constexpr):
    return tiny_code(w, number, 4, ASM)


@triton.jit
def centred(w, _scale, number: tl.constexpr, ASM: tl.constexpr):
    """Code `number` of words of V less CENTRE; a zero point per token comes after."""
    return centred_code(w, number, ASM)


@triton.jit
def _zero_point(scale):
    """The low four bits of fp32 scales, as fp32."""
    return (scale.to(tl.int32, bitcast=True) & 15).to(tl.float32)


@triton.jit
def _int4_zeros(k_scale, v_scale, _least, _v_zero):
    return _zero_point(k_scale), _zero_point(v_scale) - CENTRE


def _int4_plan(case: PlanCase) -> TilePlan:
    """The fastest plan measured on an H200 (head_dim 256), and one that fits where shared memory is 100 KiB.

    More than 24 query rows are several blocks, of 24 or of 32.
    """
    if not case.large:
        return plan_small(case)
    if wide_is_less(case.q_rows, sets=3):
        return plan_wide(case)
    return plan_columns(case, tile=case.tile(of_256=128), num_warps=4, per_multiprocessor=2)


INT4 = DecodeForm(
    loop=attend_words, plan=_int4_plan,
    options={
        "codec": WordCodec(key=Codes(number=_tiny), value=Codes(number=centred), zeros=_int4_zeros, zero="code"),
    },
)  # fmt: skip

# int8 and fp8: numbers as they are, in products of fp16 with fp32 sums. int8 codes of K may enter as (code + 128) /
# 2^24, whose constant part leaves the scores through the query's sum.

ONE_ROUND = 40
"""Prologue of thread blocks that only read: second rounds have made 12 sequences 12 to 25 % slower on an H200."""
ACROSS_DIM = 256
"""Elements of a head at which rows have been measured as columns."""


@triton.jit
def _int8_key(w, ASM: tl.constexpr):
    return int8_halves(w, False, ASM)


@triton.jit
def _int8(w, ASM: tl.constexpr):
    return int8_halves(w, True, ASM)


@triton.jit
def _fp8(w, ASM: tl.constexpr):
    return fp8_halves(w, ASM)


def _bytes_plan(case: PlanCase) -> TilePlan:
    """The fastest plan measured on an H200 (head_dim 256); it fits where shared memory is 100 KiB, too.

    More than 48 query rows are several blocks that read and dequantise a tile each. Copies of 4 and 8 bytes want
    registers for their addresses. Of Hopper's matrix units rows that are columns make more: 32 of them, and 48 where no
    scales per token take the registers.
    """
    blocks = -(-case.q_rows // 48)
    rows, sets = {1: (16, 1), 2: (32, 1), 3: (16, 3)}[-(-case.q_rows // (16 * blocks))]
    across = case.aligned == 16 and case.head_dim == ACROSS_DIM and case.warpgroups and rows * sets > 16
    if across and sets > 1:
        across = not case.per_token
        rows, sets = (48, 1) if across else (rows, sets)
    return TilePlan(
        tile=case.tile(of_256=64), rows=rows, sets=sets, num_warps=4, stages=3 if case.aligned == 16 else 2,
        per_multiprocessor=2 if case.large else 1, across=across,
        prologue_tiles=ONE_ROUND if rows * sets == 16 else PROLOGUE_TILES,
    )  # fmt: skip


INT8 = DecodeForm(
    loop=attend_scaled, plan=_bytes_plan,
    options={"codec": ScaledCodec(numbers=_int8, key_numbers=_int8_key, key_unit=2.0**24, key_shift=128.0)},
)  # fmt: skip
FP8 = DecodeForm(
    loop=attend_scaled, plan=_bytes_plan, options={"codec": ScaledCodec(numbers=_fp8, key_numbers=_fp8)},
    least_capability=(8, 9),
)  # fmt: skip

FORMS = {"fp8": FP8, "fp8_per_token_head": FP8, "int8_per_token_head": INT8, "int4_per_token_head": INT4}
stable_keys(globals())
