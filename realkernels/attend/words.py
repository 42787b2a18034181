"""8-bit codes in 16-bit words, taken apart into fp16 operands of a product.

Two bytes of a row are read as one word, so that the words of a tile reach the registers of a product as 16-bit operands
do (a transposed read of single bytes does not exist before Blackwell). A word gives one number of the even and one of
the odd elements; with either half of the query, or of the output, two products add up. The inline code works on two
words at once, as they lie in a register: 3 instructions for 4 codes.
"""

import triton
import triton.language as tl


@triton.jit
def int8_halves(w, EXACT: tl.constexpr, ASM: tl.constexpr):
    """Codes int8 of words w (int16), even and odd, as fp16: the code, or (code + 128) 2^-24 where not EXACT."""
    if ASM and EXACT:
        even, odd = tl.inline_asm_elementwise(
            """{ .reg .b32 t; .reg .b32 c;
            mov.b32 c, 0x64806480;
            lop3.b32 $0, $2, 0x00ff00ff, 0x64806480, 0x6a;
            shr.u32 t, $2, 8;
            lop3.b32 $1, t, 0x00ff00ff, 0x64806480, 0x6a;
            sub.f16x2 $0, $0, c;
            sub.f16x2 $1, $1, c; }""",
            "=&r,=&r,r", [w], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    elif ASM:
        even, odd = tl.inline_asm_elementwise(
            """{ .reg .b32 t;
            lop3.b32 $0, $2, 0x00ff00ff, 0x00800080, 0x6a;
            shr.u32 t, $2, 8;
            lop3.b32 $1, t, 0x00ff00ff, 0x00800080, 0x6a; }""",
            "=&r,=&r,r", [w], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        even, odd = (w & 0xFF) ^ 0x80, ((w >> 8) & 0xFF) ^ 0x80
        if EXACT:
            even, odd = (even - 128).to(tl.float16), (odd - 128).to(tl.float16)
        else:
            even, odd = even.to(tl.int16).to(tl.float16, bitcast=True), odd.to(tl.int16).to(tl.float16, bitcast=True)
    return even, odd


@triton.jit
def _fp8_number(code):
    """e4m3fn (int16, 0 to 255) as fp16, by its bits."""
    bits = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
    number = bits.to(tl.int16).to(tl.float16, bitcast=True) * 256.0
    return tl.where((code & 0x7F) == 0x7F, float("nan"), number).to(tl.float16)


@triton.jit
def fp8_halves(w, ASM: tl.constexpr):
    """Numbers e4m3fn of words w (int16), even and odd, as fp16; compute capability 8.9 or later where ASM."""
    if ASM:
        even, odd = tl.inline_asm_elementwise(
            """{ .reg .b32 t; .reg .b16 even, odd;
            prmt.b32 t, $2, $2, 0x3120;
            mov.b32 {even, odd}, t;
            cvt.rn.f16x2.e4m3x2 $0, even;
            cvt.rn.f16x2.e4m3x2 $1, odd; }""",
            "=&r,=&r,r", [w], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        even, odd = _fp8_number(w & 0xFF), _fp8_number((w >> 8) & 0xFF)
    return even, odd
