"""Decode attention over TurboQuant's 4bit_nc: K as 16 centroids of a rotated direction, V as 4-bit codes.

Centroids of a normal variable are nearly an odd polynomial of (code - 7.5): x (a + b x^2 + x^6) in fp16, found for the
16 numbers, misses them by 1.9e-3 of a standard deviation (root of the mean square; 5.2e-3 at most), against 9.7e-2 by
which centroids miss what they stand for: it adds 4e-4 of that to the squared error. key_norm holds norm / |centroids|,
so that norms multiply scores. Values: codes less 7.5; sum(p (zero + 7.5 scale)) is added at the end. K is rotated, V is
not: the caller rotates the query.
"""

from math import sqrt

import triton
import triton.language as tl

from realkernels.codecs.decode.form import DecodeForm
from realkernels.codecs.decode.per_token_head import CENTRE, centred
from realkernels.codecs.decode.word_plans import LEAST_ASYNCHRONOUS, plan_columns, plan_rows, plan_small, plan_wide
from realkernels.kernels.arithmetic import odd_polynomial
from realkernels.kernels.decode_words import Codes, WordCodec, attend_words
from realkernels.kernels.split_kv import PlanCase, TilePlan
from realkernels.kernels.stable_keys import stable_keys

UNIT = 82.2174035
"""The polynomial gives centroids for N(0, 1) over this."""


@triton.jit
def centroid(w, _scale, number: tl.constexpr, ASM: tl.constexpr):
    """Code `number` of words of K over UNIT; norms multiply scores."""
    return odd_polynomial(w, number, 0.050140380859375, 0.045318603515625, ASM)


@triton.jit
def _zeros(_k_scale, _v_scale, least, v_zero):
    """K has none; what is added to V's codes less CENTRE."""
    return 0.0, v_zero + CENTRE * least


def _plan(case: PlanCase) -> TilePlan:
    """The fastest plan measured on an H200 (head_dim 256), and one that fits where shared memory is 100 KiB.

    More than 48 query rows are several blocks. Rows aligned to 2 bytes cannot be copied asynchronously: they pass
    through registers.
    """
    if not case.large:
        return plan_small(case)
    blocks = -(-case.q_rows // 48)
    if case.q_rows <= 24 * blocks:
        return plan_columns(
            case, tile=case.tile(of_256=64), num_warps=4, per_multiprocessor=3 if case.q_rows <= 8 else 2
        )
    if case.q_rows <= 32 * blocks and case.aligned >= LEAST_ASYNCHRONOUS:
        return plan_wide(case)
    return plan_rows(case)


FORMS = {
    "turboquant_4bit_nc": DecodeForm(
        loop=attend_words, plan=_plan,
        options={
            "codec": WordCodec(
                key=Codes(number=centroid), value=Codes(number=centred), zeros=_zeros, zero="value",
                planes=("key_norm", "value_scale", "value_zero"), score_unit=lambda head_dim: UNIT / sqrt(head_dim),
            ),
        },
    ),
}  # fmt: skip
stable_keys(globals())
