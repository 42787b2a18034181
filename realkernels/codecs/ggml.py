"""llama.cpp's cache types q8_0, q4_0, q5_1 and iq4_nl: groups of 32 elements of a head with a float16 scale.

| bytes of a group, inline | q8_0 | q4_0 | q5_1 | iq4_nl |
|---|---|---|---|---|
| scale, float16 | 0 .. 1 | 0 .. 1 | 0 .. 1 | 0 .. 1 |
| minimum, float16 | | | 2 .. 3 | |
| fifth bits: that of element j is bit j of an int32 | | | 4 .. 7 | |
| codes | 2 .. 33, two's complement | 2 .. 17, nibbles | 8 .. 23, nibbles | 2 .. 17, nibbles |

Nibbles: element j in the low half of byte j, element j + 16 in the high one. inline: key_blocks and value_blocks uint8
[page, token, head, D / 32, bytes of a group]. aligned: each row of the table in a plane of its own, page, head, token,
group; the same bytes. So codes of q5_1 and iq4_nl lie in runs of 16 B as those of q4_0, which the decode attention
kernels take apart by words, and fifth bits in a word a group beside them. Source: llama.cpp `ggml-common.h`.

q8_0: scale = absmax / 127, code = round(x / scale), x = code x scale. q4_0: scale = m / -8 where m is the first element
of the largest magnitude with its sign; code = floor(x / scale + 8.5) in 0 .. 15, x = (code - 8) x scale: what lies as
far as m on the other side loses up to a whole scale. Codes of both are found with the scale as stored, in float16.

q5_1 and iq4_nl are quantised as by the copy kernel that fills a cache (`ggml-cuda/cpy-utils.cuh`), in float32. q5_1:
scale = (max - min) / 31, code = floor((x - min) (1 / scale) + 0.5), x = code x scale + min. iq4_nl: d = m / -127, the
code is that of the value of LEVELS nearest to x (1 / d), the larger of two as near, and the scale is the one of least
squared error weighted with x^2: sum(x^2 v x) / sum(x^2 v v) over the values v, each sum by halves (there: in turn).

A group that holds NaN or infinity, or whose scale or minimum exceeds 65,504, is NaN: those 32 elements of that token
only.
"""

from functools import lru_cache, partial
from typing import Any, ClassVar

import torch

from realkernels.codecs import on_device as dev
from realkernels.codecs.arithmetic import folded_sum, half_scale, over
from realkernels.codecs.codec import PLANES, Part, PartLayout, Plane, Planes, RowCodec, Rows, check_multiple
from realkernels.codecs.per_token_head import dequantise_int8
from realkernels.jit import tl, triton
from realkernels.kernels.arithmetic import scaled_code
from realkernels.kernels.decode_form import DecodeForm, plan_groups
from realkernels.kernels.decode_words import Codes, WordCodec, attend_words

GROUP = 32
HALF = GROUP // 2
SCALE = Part("scale", torch.float16)
NIBBLES = Part("data", torch.uint8, (HALF,))


class Ggml(RowCodec):
    """A scale and codes for each 32 elements."""

    arrangements = ("inline", "aligned")
    group = GROUP
    block: ClassVar[tuple[Part, ...]]
    """A group's parts in their order, without the plane's name."""

    def check(self, head_dim: int) -> None:
        """Whole groups."""
        check_multiple(self.name, head_dim, GROUP)

    def published(self, head_dim: int) -> tuple[PartLayout, ...]:
        """A tensor of blocks for K and one for V; page, token, head, group."""
        return tuple(
            PartLayout(
                f"{plane}_blocks",
                tuple(Part(f"{plane}_{part.name}", part.dtype, part.shape) for part in self.block),
                (head_dim // GROUP,),
            )
            for plane in PLANES
        )

    def kernel_parts(self, plane: Plane, planes: Planes) -> tuple[torch.Tensor, ...]:
        """Codes, scales and what else a group has."""
        others = tuple(planes.parts[f"{plane}_{part.name}"] for part in self.block[1:-1])
        return *super().kernel_parts(plane, planes), *others


def _signed_largest(groups: torch.Tensor) -> torch.Tensor:
    """[..., 1]: the first element of the largest magnitude with its sign, of float32 [..., 32]."""
    return groups.gather(-1, groups.abs().argmax(dim=-1, keepdim=True))


def _codes(groups: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Groups over their scales, 0 where that is no number."""
    return (groups / scale.float()).nan_to_num(0.0, posinf=0.0, neginf=0.0)


def _packed(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [..., 16] of codes [..., 32] below 16."""
    codes = codes.to(torch.uint8)
    return codes[..., :HALF] | codes[..., HALF:] << 4


def _unpacked(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [..., 32] of bytes [..., 16]."""
    return torch.cat((codes & 15, codes >> 4), dim=-1)


def _one_over(step: torch.Tensor) -> torch.Tensor:
    """0 of 0."""
    return torch.where(step != 0, 1 / step, 0.0)


@triton.jit
def _reciprocal(step, ROWS: tl.constexpr):
    """`_one_over` of steps [ROWS]."""
    return tl.where(step != 0.0, tl.div_rn(tl.full([ROWS], 1.0, tl.float32), step), 0.0)


@triton.jit
def _quotients(x, scale):
    """`_codes` of groups x [ROWS, 32] and scales float16 [ROWS]."""
    return dev.finite_or_zero(tl.div_rn(x, scale.to(tl.float32)[:, None]))


@triton.jit
def _store_nibbles(at, codes, there, ROWS: tl.constexpr):
    """`_packed` codes int32 [ROWS, 32] behind the pointers `at` [ROWS]."""
    halves = tl.reshape(codes << (tl.arange(0, 32) // 16 * 4)[None, :], [ROWS, 2, 16])
    tl.store(at[:, None] + tl.arange(0, 16)[None, :], tl.sum(halves, axis=1).to(tl.uint8), mask=there[:, None])


@triton.jit
def _first_largest(x):
    """[ROWS]: `_signed_largest` of float32 [ROWS, 32]."""
    bits = dev.magnitude_bits(x)
    lane = tl.arange(0, 32)[None, :]
    first = tl.min(tl.where(bits == tl.max(bits, axis=1)[:, None], lane, 32), axis=1)
    chosen = tl.where(lane == first[:, None], x.to(tl.int32, bitcast=True), 0)
    return tl.sum(chosen, axis=1).to(tl.float32, bitcast=True)


def _words(number: Any, **more: Any) -> WordCodec:
    """Nibbles in decode attention: word w of a group holds elements 2w, 2w + 16, 2w + 1, 2w + 17."""
    return WordCodec(key=Codes(number=number), value=Codes(number=number), ggml=True, **more)


# q8_0


@triton.jit
def _encode_q8_0(x, parts, place, there, keep, BITS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    scale = dev.half_scale(tl.div_rn(dev.largest_magnitude(x, 1), tl.full([ROWS], 127.0, tl.float32)))
    codes = dev.between(dev.nearest_even(_quotients(x, scale)), -127.0, 127.0).to(tl.int32)
    dev.store_codes(dev.pointer(parts[0], place)[:, None], codes, keep, ROWS, WIDTH, 8)
    tl.store(dev.pointer(parts[1], place), scale, mask=there)


@triton.jit
def _scaled_q8_0(w, scale, number: tl.constexpr, ASM: tl.constexpr):
    return scaled_code(w, scale, number, 2, 128.0, 128, ASM)


_BYTES = Codes(number=_scaled_q8_0, per_word=2)
_DECODE_Q8_0 = DecodeForm(
    loop=attend_words, plan=partial(plan_groups, wide_codes=True),
    options={"codec": WordCodec(key=_BYTES, value=_BYTES)},
)  # fmt: skip


class Q80(Ggml):
    """8 bits."""

    block = (SCALE, Part("data", torch.uint8, (GROUP,)))
    kernels = dev.RowKernels(_encode_q8_0, dequantise_int8)
    decode_form = _DECODE_Q8_0
    interleaved = dev.InterleavedKernels(dev.byte_numbers)

    def encode(self, plane: Plane, rows: torch.Tensor, planes: Planes) -> Rows:
        """The largest element of a group has the code 127 or -127."""
        groups = rows.unflatten(-1, (-1, GROUP))
        scale = half_scale(over(groups.abs().amax(dim=-1, keepdim=True), 127.0))
        codes = _codes(groups, scale).round().clamp(-127, 127)
        return {"data": codes.to(torch.int8).view(torch.uint8), "scale": scale.squeeze(-1)}

    def decode(self, plane: Plane, parts: Rows, planes: Planes) -> torch.Tensor:
        """Codes times the group's scale."""
        return (parts["data"].contiguous().view(torch.int8).float() * parts["scale"].float()[..., None]).flatten(-2)


# q4_0


@triton.jit
def _encode_q4_0(x, parts, place, there, keep, BITS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    scale = dev.half_scale(_first_largest(x) * -0.125)
    codes = dev.between(tl.floor(_quotients(x, scale) + 8.5), 0.0, 15.0).to(tl.int32)
    _store_nibbles(dev.pointer(parts[0], place), codes, there, ROWS)
    tl.store(dev.pointer(parts[1], place), scale, mask=there)


@triton.jit
def _dequantise_q4_0(out, parts, WAYS: tl.constexpr, place, live, BITS: tl.constexpr, WIDTH: tl.constexpr):
    scale = dev.load_scale(parts, WAYS, 1, place, live)
    codes = dev.load_codes(parts, WAYS, 0, place, live, WIDTH // 2)
    low, high = ((codes & 15).to(tl.float32) - 8.0) * scale, ((codes >> 4).to(tl.float32) - 8.0) * scale
    dev.store_halves(out, low, high, live, WIDTH)


@triton.jit
def _scaled_q4_0(w, scale, number: tl.constexpr, ASM: tl.constexpr):
    return scaled_code(w, scale, number, 4, 8.0, 0, ASM)


@triton.jit
def _numbers_q4_0(codes, scale, part):
    x = ((codes >> (4 * part)) & 15).to(tl.float32)
    x -= 8.0
    return x


class Q40(Ggml):
    """4 bits."""

    block = (SCALE, NIBBLES)
    kernels = dev.RowKernels(_encode_q4_0, _dequantise_q4_0)
    decode_form = DecodeForm(loop=attend_words, plan=plan_groups, options={"codec": _words(_scaled_q4_0)})
    interleaved = dev.InterleavedKernels(_numbers_q4_0, element=dev.halves_of_32)

    def encode(self, plane: Plane, rows: torch.Tensor, planes: Planes) -> Rows:
        """The element of the largest magnitude has the code 0."""
        groups = rows.unflatten(-1, (-1, GROUP))
        scale = half_scale(_signed_largest(groups) / -8)
        codes = (_codes(groups, scale) + 8.5).floor().clamp(0, 15)
        return {"data": _packed(codes), "scale": scale.squeeze(-1)}

    def decode(self, plane: Plane, parts: Rows, planes: Planes) -> torch.Tensor:
        """Centred codes times the group's scale."""
        return ((_unpacked(parts["data"]).float() - 8) * parts["scale"].float()[..., None]).flatten(-2)


# q5_1


@triton.jit
def _encode_q5_1(x, parts, place, there, keep, BITS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    worst = dev.largest_magnitude(x, 1)  # a minimum may drop NaN, this does not
    low = dev.nan_like(tl.min(x, axis=1), worst) + 0.0  # -0 becomes 0
    step = tl.div_rn(dev.nan_like(tl.max(x, axis=1), worst) - low, tl.full([ROWS], 31.0, tl.float32))
    codes = dev.number_or((x - low[:, None]) * _reciprocal(step, ROWS)[:, None], 0.0)
    codes = dev.between(tl.floor(codes + 0.5), 0.0, 31.0).to(tl.int32)
    _store_nibbles(dev.pointer(parts[0], place), codes & 15, there, ROWS)
    tl.store(dev.pointer(parts[1], place), dev.half_scale(step), mask=there)
    tl.store(dev.pointer(parts[2], place), dev.half_scale(low), mask=there)
    fifth = tl.sum((codes >> 4) << tl.arange(0, 32)[None, :], axis=1)
    tl.store(dev.pointer(parts[3], place), fifth, mask=there)


@triton.jit
def _dequantise_q5_1(out, parts, WAYS: tl.constexpr, place, live, BITS: tl.constexpr, WIDTH: tl.constexpr):
    scale, low = dev.load_scale(parts, WAYS, 1, place, live), dev.load_scale(parts, WAYS, 2, place, live)
    fifth = dev.load_codes(parts, WAYS, 3, place, live, 1)
    codes = dev.load_codes(parts, WAYS, 0, place, live, WIDTH // 2)
    bit = tl.arange(0, WIDTH // 2)[None, :]
    first = (codes & 15).to(tl.int32) | (((fifth >> bit) & 1) << 4)
    second = (codes >> 4).to(tl.int32) | (((fifth >> (bit + WIDTH // 2)) & 1) << 4)
    dev.store_halves(out, first.to(tl.float32) * scale + low, second.to(tl.float32) * scale + low, live, WIDTH)


@triton.constexpr_function
def _minimum_assembly(number):
    shift, high = 4 * number - 2, 6 - (0, 2, 1, 3)[number]
    move = f"shr.u32 t, $1, {shift};" if shift > 0 else "shl.b32 t, $1, 2;"
    return f"""{{ .reg .b32 t, h; {move} lop3.b32 t, t, 0x003c003c, 0x5c005c00, 0x6a;
        shl.b32 h, $4, {high}; lop3.b32 t, h, 0x00400040, t, 0xea;
        mov.b32 h, 0x5c005c00; sub.rn.f16x2 t, t, h; fma.rn.f16x2 $0, t, $2, $3; }}"""


@triton.jit
def _scaled_q5_1(w, scales, number: tl.constexpr, ASM: tl.constexpr):
    """fp16 code scale + minimum, rounded once, of words w and their groups' (scale, minimum, fifth bits).

    Fifth bits as of `_fifth_bits` of `kernels/word_steps.py`; they are put on top of the codes.
    """
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


@triton.jit
def _numbers_q5_1(codes, fifth, part):
    """Codes with their fifth bits, of interleaved blocks: byte j of a group has elements j and j + 16."""
    bit = tl.arange(0, codes.shape[1]) % 16 + 16 * part
    return (((codes >> (4 * part)) & 15).to(tl.int32) | (((fifth >> bit[None, :]) & 1) << 4)).to(tl.float32)


class Q51(Ggml):
    """5 bits between a group's extremes."""

    block = (SCALE, Part("minimum", torch.float16), Part("fifth", torch.int32), NIBBLES)
    kernels = dev.RowKernels(_encode_q5_1, _dequantise_q5_1)
    decode_form = DecodeForm(
        loop=attend_words, plan=partial(plan_groups, wide_codes=True),
        options={
            "codec": _words(
                _scaled_q5_1, zero="min", minima=("key_minimum", "value_minimum", "key_fifth", "value_fifth")
            ),
        },
    )  # fmt: skip
    interleaved = dev.InterleavedKernels(_numbers_q5_1, element=dev.halves_of_32)

    def encode(self, plane: Plane, rows: torch.Tensor, planes: Planes) -> Rows:
        """The extremes have the codes 0 and 31."""
        groups = rows.unflatten(-1, (-1, GROUP))
        low = groups.amin(dim=-1, keepdim=True) + 0.0  # -0 becomes 0
        step = over(groups.amax(dim=-1, keepdim=True) - low, 31.0)
        codes = ((groups - low) * _one_over(step)).nan_to_num(0.0)
        codes = (codes + 0.5).floor().clamp(0, 31).to(torch.int64)
        fifth = ((codes >> 4) << torch.arange(GROUP, device=codes.device)).sum(dim=-1)
        return {
            "data": _packed(codes & 15), "scale": half_scale(step).squeeze(-1), "fifth": fifth.to(torch.int32),
            "minimum": half_scale(low).squeeze(-1),
        }  # fmt: skip

    def decode(self, plane: Plane, parts: Rows, planes: Planes) -> torch.Tensor:
        """Codes times the group's scale, and its minimum."""
        fifth = parts["fifth"][..., None] >> torch.arange(GROUP, device=parts["fifth"].device) & 1
        codes = _unpacked(parts["data"]) + (fifth << 4)
        return (codes.float() * parts["scale"].float()[..., None] + parts["minimum"].float()[..., None]).flatten(-2)


# iq4_nl


@triton.jit
def _encode_iq4_nl(x, parts, place, there, keep, BITS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    step = tl.div_rn(_first_largest(x), tl.full([ROWS], -127.0, tl.float32))
    y = dev.number_or(x * _reciprocal(step, ROWS)[:, None], 0.0)
    codes = tl.zeros([ROWS, WIDTH], tl.int32)
    for number in tl.static_range(15):
        codes += (y >= tl.load(parts[3][0] + number)).to(tl.int32)
    value = tl.load(parts[2][0] + codes)
    product = dev.sum_of_columns(x * x * value * x, ROWS, WIDTH)
    square = dev.sum_of_columns(x * x * value * value, ROWS, WIDTH)
    scale = tl.where(square > 0.0, tl.div_rn(product, square), step[:, None])
    _store_nibbles(dev.pointer(parts[0], place), codes, there, ROWS)
    tl.store(dev.pointer(parts[1], place)[:, None], dev.half_scale(scale), mask=there[:, None])


@triton.jit
def _dequantise_iq4_nl(out, parts, WAYS: tl.constexpr, place, live, BITS: tl.constexpr, WIDTH: tl.constexpr):
    scale = dev.load_scale(parts, WAYS, 1, place, live)
    codes = dev.load_codes(parts, WAYS, 0, place, live, WIDTH // 2)
    low, high = tl.load(parts[2] + (codes & 15).to(tl.int32)), tl.load(parts[2] + (codes >> 4).to(tl.int32))
    dev.store_halves(out, low * scale, high * scale, live, WIDTH)


LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What a code of iq4_nl stands for, in units of the scale."""


@lru_cache(maxsize=8)
def levels(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """float32: LEVELS [16], and the middles between two of them [15], where the nearest one changes."""
    table = torch.tensor(LEVELS, dtype=torch.float32, device=device)
    return table, (table[1:] + table[:-1]) / 2


@triton.constexpr_function
def _eight_levels(first):
    """LEVELS from number `first` on as the bytes of an int64."""
    packed = sum((LEVELS[first + i] & 255) << 8 * i for i in range(8))
    return packed - (packed >> 63 << 64)


@triton.jit
def _level(code):
    """LEVELS as float32, of codes int32 below 16."""
    few, many = tl.full([], _eight_levels(0), tl.int64), tl.full([], _eight_levels(8), tl.int64)
    return (tl.where(code < 8, few, many) >> ((code & 7) * 8)).to(tl.int8).to(tl.float32)


@triton.constexpr_function
def _table_assembly(number):
    """Bytes 128 above LEVELS are looked up for the four codes of a word at once, and the one of code `number` taken.

    Among the first eight levels and among the last, chosen between by the codes' highest bits. The assembly of all four
    codes begins alike, which the compiler does once.
    """
    table = [sum(LEVELS[4 * part + i] + 128 << 8 * i for i in range(4)) for part in range(4)]
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
def _scaled_iq4_nl(w, scale, number: tl.constexpr, ASM: tl.constexpr):
    """fp16: the level times scale, rounded once."""
    if ASM:
        x = tl.inline_asm_elementwise(
            _table_assembly(number), "=&r,r,r", [w, scale], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        x = (_level((w.to(tl.int32) >> 4 * number) & 15) * scale.to(tl.float32)).to(tl.float16)
    return x


@triton.jit
def _numbers_iq4_nl(codes, scale, part):
    return _level(((codes >> (4 * part)) & 15).to(tl.int32))


class Iq4Nl(Ggml):
    """4 bits, each a level of a table."""

    block = (SCALE, NIBBLES)
    kernels = dev.RowKernels(_encode_iq4_nl, _dequantise_iq4_nl)
    decode_form = DecodeForm(
        loop=attend_words, plan=partial(plan_groups, wide_codes=True), options={"codec": _words(_scaled_iq4_nl)}
    )
    interleaved = dev.InterleavedKernels(_numbers_iq4_nl, element=dev.halves_of_32)

    def warm(self, head_dim: int, device: torch.device) -> None:
        """The levels."""
        levels(device)

    def kernel_parts(self, plane: Plane, planes: Planes) -> tuple[torch.Tensor, ...]:
        """And the levels."""
        return *super().kernel_parts(plane, planes), *levels(planes.device)

    def encode(self, plane: Plane, rows: torch.Tensor, planes: Planes) -> Rows:
        """The element of the largest magnitude decides the codes, all of them the scale."""
        groups = rows.unflatten(-1, (-1, GROUP))
        table, middles = levels(rows.device)
        step = over(_signed_largest(groups), -127.0)
        codes = torch.bucketize((groups * _one_over(step)).nan_to_num(0.0).contiguous(), middles, right=True)
        value = table[codes]
        product = folded_sum(groups * groups * value * groups, -1)
        square = folded_sum(groups * groups * value * value, -1)
        scale = torch.where(square > 0, product / square, step)
        return {"data": _packed(codes), "scale": half_scale(scale).squeeze(-1)}

    def decode(self, plane: Plane, parts: Rows, planes: Planes) -> torch.Tensor:
        """Levels times the group's scale."""
        table, _ = levels(planes.device)
        return (table[_unpacked(parts["data"]).long()] * parts["scale"].float()[..., None]).flatten(-2)


CODECS = {"q8_0": Q80, "q4_0": Q40, "q5_1": Q51, "iq4_nl": Iq4Nl}
