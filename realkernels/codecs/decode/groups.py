"""Decode attention over caches with an fp16 scale per 32 elements: q4_0, q8_0 and exl3 in 4 or 8 bits.

A code becomes fp16 exactly, its zero is taken off, and it is multiplied by its group's scale, two at a time: x =
(code - zero) scale, rounded once. Scales are read once a group and tile and spread over their words in registers. exl3
is rotated within groups: the caller rotates the query before and the output after.
"""

from functools import partial

import triton
import triton.language as tl

from realkernels.codecs.decode.form import DecodeForm
from realkernels.codecs.decode.word_plans import (
    LEAST_ASYNCHRONOUS,
    plan_columns,
    plan_rows,
    plan_small,
    plan_wide,
    wide_is_less,
)
from realkernels.kernels.arithmetic import scaled_code
from realkernels.kernels.decode_words import Codes, WordCodec, attend_words
from realkernels.kernels.split_kv import PlanCase, TilePlan


def _plan(case: PlanCase, *, codec: WordCodec) -> TilePlan:
    """The fastest plan measured on an H200 (head_dim 256), and one that fits where shared memory is 100 KiB.

    More than 24 or 32 query rows are several blocks. Rows aligned to 2 bytes cannot be copied asynchronously: they pass
    through registers, which a wide plan has none left for.
    """
    wide_codes = 2 in {codec.key.per_word, codec.value.per_word}
    if not case.large:
        return plan_small(case, wide_codes=wide_codes)
    alone = case.q_rows <= 8 and not wide_codes
    if case.aligned < LEAST_ASYNCHRONOUS and not alone and not wide_codes:
        return plan_rows(case)
    if case.aligned >= LEAST_ASYNCHRONOUS and wide_is_less(case.q_rows, sets=3 if wide_codes else 2):
        return plan_wide(case)
    return plan_columns(
        case, tile=case.tile(of_256=64), num_warps=2 if alone else 4, per_multiprocessor=4 if alone else 2
    )


def _form(key: Codes, value: Codes, *, ggml: bool = False) -> DecodeForm:
    codec = WordCodec(key=key, value=value, ggml=ggml)
    return DecodeForm(loop=attend_words, plan=partial(_plan, codec=codec), options={"codec": codec})


# q4_0


@triton.jit
def _q4_0(w, scale, number: tl.constexpr, ASM: tl.constexpr):
    return scaled_code(w, scale, number, 4, 8.0, 0, ASM)


Q4_0 = _form(Codes(number=_q4_0), Codes(number=_q4_0), ggml=True)


# q8_0


@triton.jit
def _q8_0(w, scale, number: tl.constexpr, ASM: tl.constexpr):
    return scaled_code(w, scale, number, 2, 128.0, 128, ASM)


Q8_0 = _form(Codes(number=_q8_0, per_word=2), Codes(number=_q8_0, per_word=2))


# exl3 of 4 and 8 bits: codes stand for evenly spaced numbers about zero


@triton.jit
def _exl3_4(w, scale, number: tl.constexpr, ASM: tl.constexpr):
    return scaled_code(w, scale, number, 4, 7.5, 0, ASM)


@triton.jit
def _exl3_8(w, scale, number: tl.constexpr, ASM: tl.constexpr):
    return scaled_code(w, scale, number, 2, 127.5, 0, ASM)


_EXL3 = {4: Codes(number=_exl3_4, unit=1 / 8), 8: Codes(number=_exl3_8, per_word=2, unit=1 / 128)}

FORMS = {
    "q8_0": Q8_0,
    "q4_0": Q4_0,
    **{f"exl3_k{k}v{v}": _form(_EXL3[k], _EXL3[v]) for k in _EXL3 for v in _EXL3},
}
