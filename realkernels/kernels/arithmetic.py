"""Arithmetic that kernels share: powers of two, and codes in registers that become fp16 numbers in a few instructions.

ASM says whether PTX may be used: never in the interpreter, which takes the plain form beside it.

Codes lie in 16-bit words of two to eight; `number` is a code's place within its word. Words of a tile reach the
registers of a product as 16-bit operands do, two words a register, and are dequantised after that: masked, and read as
fp16 as they are (a subnormal number, exact) or with the exponent of a base put in (base + code).

Triton moves a change of layout from an operand back to its load only across operations of one result whose other
operands are loads or constants: hence one call a code, and all constants within the assembly.
"""

from realkernels.jit import tl, triton


@triton.jit
def exp2(x, ASM: tl.constexpr):
    """2^x; one instruction, to zero below 2^-126, where the hardware's may be used."""
    if ASM:
        y = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y = tl.exp2(x)
    return y


@triton.jit
def log2(x, ASM: tl.constexpr):
    """Logarithm to base 2, likewise; x above 2^-126."""
    if ASM:
        y = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y = tl.log2(x)
    return y


@triton.jit
def largest(x):
    """Largest magnitude of a matrix, a scalar."""
    return tl.max(tl.max(tl.abs(x), axis=1), axis=0)


@triton.jit
def power_below(number):
    """A power of two p for fp32 numbers >= 0: number / p is in [1, 2); 1 for tiny numbers and zero."""
    bits = (number.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(number < 1e-30, 1.0, bits)


@triton.constexpr_function
def _pair(bits):
    """The same 16 bits twice, as PTX writes 32."""
    return f"0x{bits << 16 | bits:08x}"


@triton.constexpr_function
def _half(number):
    """Bits of a normal fp16 number; a compile-time function may not call the library for it."""
    sign, number, exponent = 0x8000 if number < 0 else 0, abs(number), 15
    while 2.0 ** (exponent - 14) <= number:
        exponent += 1
    while 2.0 ** (exponent - 15) > number:
        exponent -= 1
    return sign | (exponent << 10) + int((number / 2.0 ** (exponent - 15) - 1.0) * 1024.0)


@triton.constexpr_function
def _move(number, per_word, to):
    """Assembly that brings code `number` of each word to bit `to` of t; what is around it is masked away later."""
    shift = number * 16 // per_word - to
    if shift == 0:
        return "mov.b32 t, $1;"
    return f"shr.u32 t, $1, {shift};" if shift > 0 else f"shl.b32 t, $1, {-shift};"


@triton.constexpr_function
def _tiny_at(number, per_word):
    """Bit to which a code is brought: within the ten of fp16's mantissa, with one shift a word for those above."""
    bits = 16 // per_word
    at = number * bits
    return at if at + bits <= 10 else at - (8 if bits == 4 else 6)


@triton.constexpr_function
def tiny_unit(number, per_word):
    """What undoes the scale of `tiny_code`."""
    return 2.0 ** (24 - _tiny_at(number, per_word))


@triton.constexpr_function
def _tiny_assembly(number, per_word):
    at = _tiny_at(number, per_word)
    mask = (1 << 16 // per_word) - 1 << at
    return f"{{ .reg .b32 t; {_move(number, per_word, at)} and.b32 $0, t, {_pair(mask)}; }}"


@triton.constexpr_function
def _based(number, per_word, unit, flip):
    """Assembly that leaves (base + (code ^ flip)) x unit in t, and the base: one shift for two neighbouring codes."""
    bits = 16 // per_word
    at = 0 if bits == 8 else (2 if number % 2 == 0 else 6)
    base = 2.0 ** (10 - at)
    mask = (1 << bits) - 1 << at
    exponent = _half(base * unit) | flip << at
    return f"{_move(number, per_word, at)} lop3.b32 t, t, {_pair(mask)}, {_pair(exponent)}, 0x6a;", base


@triton.constexpr_function
def _scaled_assembly(number, per_word, zero, flip):
    text, base = _based(number, per_word, 1.0, flip)
    first = base + zero if zero == int(zero) or base < 1024 else base + zero + 0.5  # 1024 + a half is no fp16 number
    head = f"{{ .reg .b32 t, c; {text} mov.b32 c, {_pair(_half(first))}; sub.rn.f16x2 t, t, c;"
    if first == base + zero:
        return f"{head} mul.rn.f16x2 $0, t, $2; }}"
    return f"{head} mov.b32 c, {_pair(_half(0.5))}; mul.rn.f16x2 c, $2, c; fma.rn.f16x2 $0, t, $2, c; }}"


@triton.constexpr_function
def _centred_assembly(number):
    text, base = _based(number, 4, 1.0, 0)
    return f"{{ .reg .b32 t, c; {text} mov.b32 c, {_pair(_half(base + 7.5))}; sub.rn.f16x2 $0, t, c; }}"


@triton.constexpr_function
def _odd_assembly(number, a, b):
    text, base = _based(number, 4, 1.0 / 16, 0)
    zero, a, b = (_pair(_half(part)) for part in ((base + 7.5) / 16, a, b))
    return f"""{{ .reg .b32 t, y, s, c; {text} mov.b32 c, {zero}; sub.rn.f16x2 t, t, c; mul.rn.f16x2 y, t, t;
        mov.b32 c, {b}; fma.rn.f16x2 s, y, y, c; mov.b32 c, {a}; fma.rn.f16x2 s, y, s, c; mul.rn.f16x2 $0, t, s; }}"""


@triton.jit
def _code(w, number: tl.constexpr, per_word: tl.constexpr):
    return (w.to(tl.int32) >> (16 // per_word * number)) & ((1 << (16 // per_word)) - 1)


@triton.jit
def _of_words(TEXT: tl.constexpr, w):
    """fp16 of words (int16) through assembly that takes two at a time."""
    return tl.inline_asm_elementwise(TEXT, "=r,r", [w], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def tiny_code(w, number: tl.constexpr, per_word: tl.constexpr, ASM: tl.constexpr):
    """fp16 code / tiny_unit(number, per_word), exact, of words w (int16) of 4 or 8 codes."""
    if ASM:
        codes = _of_words(_tiny_assembly(number, per_word), w)
    else:
        codes = (_code(w, number, per_word) << _tiny_at(number, per_word)).to(tl.int16).to(tl.float16, bitcast=True)
    return codes


@triton.jit
def scaled_code(
    w, scale, number: tl.constexpr, per_word: tl.constexpr, zero: tl.constexpr, flip: tl.constexpr, ASM: tl.constexpr
):
    """fp16 ((code ^ flip) - zero) x scale, rounded once, of words w (int16) and scales (fp16) of one shape.

    2 or 4 codes a word; zero whole or a half. flip 128 with zero 128 reads int8.
    """
    if ASM:
        x = tl.inline_asm_elementwise(
            _scaled_assembly(number, per_word, zero, flip), "=r,r,r", [w, scale], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        exact = (_code(w, number, per_word) ^ flip).to(tl.float32) - zero
        x = (exact * scale.to(tl.float32)).to(tl.float16)
    return x


@triton.jit
def centred_code(w, number: tl.constexpr, ASM: tl.constexpr):
    """fp16 code - 7.5, exact, of words w (int16) of four codes.

    Numbers about zero: matrix units truncate what they add up, so that a large sum which only a zero point takes away
    again would be off by more than what is left of it.
    """
    if ASM:
        codes = _of_words(_centred_assembly(number), w)
    else:
        codes = (_code(w, number, 4).to(tl.float32) - 7.5).to(tl.float16)
    return codes


@triton.jit
def odd_polynomial(w, number: tl.constexpr, a: tl.constexpr, b: tl.constexpr, ASM: tl.constexpr):
    """fp16 x (a + b x^2 + x^6), x = (code - 7.5) / 16, each step rounded, of words w (int16) of four codes."""
    if ASM:
        value = _of_words(_odd_assembly(number, a, b), w)
    else:
        x = (_code(w, number, 4).to(tl.float32) - 7.5) / 16
        y = (x * x).to(tl.float16).to(tl.float32)
        rest = (y * y + b).to(tl.float16).to(tl.float32)
        rest = (y * rest + a).to(tl.float16).to(tl.float32)
        value = (x * rest).to(tl.float16)
    return value


@triton.jit
def packed(x, ASM: tl.constexpr):
    """The same numbers (fp16), two a register from here on: otherwise each use puts pairs together anew."""
    if ASM:
        x = _of_words("{ .reg .b32 o, z; mov.b32 o, 0x3c003c00; mov.b32 z, 0x80008000; fma.rn.f16x2 $0, $1, o, z; }", x)
    return x


@triton.jit
def _halves_of_words(TEXT: tl.constexpr, w):
    """Two fp16 numbers of each word (int16), even and odd elements, through assembly that takes two words at a time."""
    return tl.inline_asm_elementwise(
        TEXT, "=&r,=&r,r", [w], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
    )  # fmt: skip


@triton.jit
def int8_halves(w, EXACT: tl.constexpr, ASM: tl.constexpr):
    """Codes int8 of words w (int16), even and odd, as fp16: the code, or (code + 128) 2^-24 where not EXACT."""
    if ASM and EXACT:
        even, odd = _halves_of_words(
            """{ .reg .b32 t; .reg .b32 c;
            mov.b32 c, 0x64806480;
            lop3.b32 $0, $2, 0x00ff00ff, 0x64806480, 0x6a;
            shr.u32 t, $2, 8;
            lop3.b32 $1, t, 0x00ff00ff, 0x64806480, 0x6a;
            sub.f16x2 $0, $0, c;
            sub.f16x2 $1, $1, c; }""",
            w,
        )
    elif ASM:
        even, odd = _halves_of_words(
            """{ .reg .b32 t;
            lop3.b32 $0, $2, 0x00ff00ff, 0x00800080, 0x6a;
            shr.u32 t, $2, 8;
            lop3.b32 $1, t, 0x00ff00ff, 0x00800080, 0x6a; }""",
            w,
        )
    else:
        even, odd = (w & 0xFF) ^ 0x80, ((w >> 8) & 0xFF) ^ 0x80
        if EXACT:
            even, odd = (even - 128).to(tl.float16), (odd - 128).to(tl.float16)
        else:
            even, odd = even.to(tl.int16).to(tl.float16, bitcast=True), odd.to(tl.int16).to(tl.float16, bitcast=True)
    return even, odd


@triton.jit
def halves(x, index, PAIRS: tl.constexpr):
    """FP32 of fp16 x, or of PAIRS: int32 x[n] holds two neighbours, number index[n] of a row at one half or the other.

    Asynchronous loads take 4 bytes or more, so that each thread loads a pair for the sake of one of it.
    """
    if PAIRS:
        x = (x >> (index % 2 * 16)).to(tl.int16).to(tl.float16, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def neighbours(pairs):
    """FP32 [2 N] of fp16 numbers in pairs, int32 [N]: loads below 4 bytes are not asynchronous."""
    low = pairs.to(tl.int16).to(tl.float16, bitcast=True)
    high = (pairs >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.join(low, high).reshape(2 * pairs.shape[0]).to(tl.float32)


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
        even, odd = _halves_of_words(
            """{ .reg .b32 t; .reg .b16 even, odd;
            prmt.b32 t, $2, $2, 0x3120;
            mov.b32 {even, odd}, t;
            cvt.rn.f16x2.e4m3x2 $0, even;
            cvt.rn.f16x2.e4m3x2 $1, odd; }""",
            w,
        )
    else:
        even, odd = _fp8_number(w & 0xFF), _fp8_number((w >> 8) & 0xFF)
    return even, odd
