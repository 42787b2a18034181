"""Decode attention over caches with an fp16 scale per 32 elements: q4_0, iq4_nl, q5_1, q8_0 and exl3 in 4 or 8 bits.

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


def _busy_plan(case: PlanCase) -> TilePlan:
    """For codes that take many instructions, not measured yet: 128 threads, whose registers hold a tile's."""
    if case.large and case.aligned >= LEAST_ASYNCHRONOUS and wide_is_less(case.q_rows, sets=2):
        return plan_wide(case)
    if not case.large:
        return plan_small(case, wide_codes=True)
    return plan_columns(case, tile=case.tile(of_256=64), num_warps=4, per_multiprocessor=2)


def _form(key: Codes, value: Codes, *, ggml: bool = False) -> DecodeForm:
    codec = WordCodec(key=key, value=value, ggml=ggml)
    return DecodeForm(loop=attend_words, plan=partial(_plan, codec=codec), options={"codec": codec})


# q4_0


@triton.jit
def _q4_0(w, scale, number: tl.constexpr, ASM: tl.constexpr):
    return scaled_code(w, scale, number, 4, 8.0, 0, ASM)


Q4_0 = _form(Codes(number=_q4_0), Codes(number=_q4_0), ggml=True)


# iq4_nl: a code is the place of a number in a table. Bytes of the table, 128 above its numbers, are looked up for the
# four codes of a word at once, among the first eight and among the last, and chosen between by the codes' highest bits;
# the assembly of all four codes begins alike, which the compiler does once.


@triton.constexpr_function
def _nearly_normal(code):
    """llama.cpp's kvalues_iq4nl."""
    return (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)[code]


@triton.constexpr_function
def _table_assembly(number):
    table = [sum(_nearly_normal(4 * part + i) + 128 << 8 * i for i in range(4)) for part in range(4)]
    text = "{ .reg .b32 a, b, c, d, t, u, v, w, s; " + " ".join(
        f"mov.b32 {name}, 0x{part:08x};" for name, part in zip("abcd", table, strict=True)
    )
    for word, found in (("$1", "u"), ("s", "v")):
        text += f"""
            and.b32 t, {word}, 0x7777; prmt.b32 {found}, a, b, t; prmt.b32 w, c, d, t;
            shr.u32 t, {word}, 1; lop3.b32 t, t, 0x4444, 0x3210, 0xea; prmt.b32 {found}, {found}, w, t;
            shr.u32 s, $1, 16;"""
    return (
        f"""{text} prmt.b32 t, u, v, 0x{number + 4:x}0{number:x}; lop3.b32 t, t, 0x00ff00ff, 0x64006400, 0xea;
        mov.b32 u, 0x64806480; sub.rn.f16x2 t, t, u; mul.rn.f16x2 $0, t, $2; }}"""
    )  # fmt: skip


@triton.jit
def iq4_nl(w, scale, number: tl.constexpr, ASM: tl.constexpr):
    """fp16: the table's number times scale, rounded once."""
    if ASM:
        x = tl.inline_asm_elementwise(
            _table_assembly(number), "=&r,r,r", [w, scale], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        code = (w.to(tl.int32) >> 4 * number) & 15
        x = tl.zeros(w.shape, tl.float32)
        for each in tl.static_range(16):
            x = tl.where(code == each, _nearly_normal(each), x)
        x = (x * scale.to(tl.float32)).to(tl.float16)
    return x


_IQ4_NL = WordCodec(key=Codes(number=iq4_nl), value=Codes(number=iq4_nl), ggml=True)
IQ4_NL = DecodeForm(loop=attend_words, plan=_busy_plan, options={"codec": _IQ4_NL})


# q5_1: x = code scale + minimum, rounded once; fifth bits are put on top of the codes


@triton.constexpr_function
def _minimum_assembly(number):
    shift, high = 4 * number - 2, 6 - (0, 2, 1, 3)[number]
    move = f"shr.u32 t, $1, {shift};" if shift > 0 else "shl.b32 t, $1, 2;"
    return f"""{{ .reg .b32 t, h; {move} lop3.b32 t, t, 0x003c003c, 0x5c005c00, 0x6a;
        shl.b32 h, $4, {high}; lop3.b32 t, h, 0x00400040, t, 0xea;
        mov.b32 h, 0x5c005c00; sub.rn.f16x2 t, t, h; fma.rn.f16x2 $0, t, $2, $3; }}"""


@triton.jit
def q5_1(w, scales, number: tl.constexpr, ASM: tl.constexpr):
    """fp16 of words w, their groups' (scale, minimum, fifth bits as `_fifth_bits` of `word_steps.py`)."""
    scale, least, high = scales
    if ASM:
        x = tl.inline_asm_elementwise(
            _minimum_assembly(number), "=&r,r,r,r,r", [w, scale, least, high], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        top = (high.to(tl.int32) >> (number % 2 * 2 + number // 2)) & 1
        code = ((w.to(tl.int32) >> 4 * number) & 15) | top << 4
        x = (code.to(tl.float32) * scale.to(tl.float32) + least.to(tl.float32)).to(tl.float16)
    return x


_Q5_1 = WordCodec(
    key=Codes(number=q5_1), value=Codes(number=q5_1), ggml=True, zero="min",
    minima=("key_min", "value_min", "key_high", "value_high"),
)  # fmt: skip
Q5_1 = DecodeForm(loop=attend_words, plan=_busy_plan, options={"codec": _Q5_1})


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
AWAITED = {"iq4_nl": IQ4_NL, "q5_1": Q5_1}
"""Not in the table before codecs of these names write such caches."""
