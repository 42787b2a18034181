"""K and V in int8, or in 4 bits after a rotation, with a float32 scale for each token and head.

| arrangement | tensor | bytes |
|---|---|---|
| inline | token_heads uint8 [page, head, token, 2 (C + 4)] | K codes [C], K float32 scale, V codes, V scale |
| aligned | key_data, value_data uint8 [page, head, token, C] | codes |
| aligned | key_scale, value_scale float32 [page, head, token] | scales |

C bytes of codes: D for 8 bits; D / 2 for 4, element 2 j in the low nibble of byte j and 2 j + 1 in the high one. Inline
a head of 256 in 8 bits has 260 B, so that every other one begins 4 B off a 16 B boundary. Source: vLLM 0.28.0
`v1/attention/backends/triton_attn.py`, `ops/triton_reshape_and_cache_flash.py`, `ops/int4_per_token_head.py`.

int8: two's complement, scale = max(absmax / 127, 1e-6); codes round half away from zero; x = code x scale.

int4: rotation R x = H (signs x), H of Sylvester's and not normalised, so that lengths grow by sqrt(D); K and V alike.
Then scale = (max - min) / 15, zero = round(-min / scale) in 0 .. 15, code = round(x / scale + zero), x = (code - zero)
x scale. The 4 lowest mantissa bits of the scale are the zero point. Three choices where the description is silent: the
range is widened to hold 0 (only then does a zero point of 0 .. 15 fit it; a key along the first channel would be lost
otherwise), a range of nothing has scale 1e-6, and the scale is the float32 with its 4 low bits cleared. A kernel that
leaves them in is off by 2^-19.

A row of K or of V that holds NaN or infinity gets the scale NaN and is NaN as a whole: that token, head and plane only.
"""

from abc import ABC
from typing import ClassVar

import torch

from realkernels.codecs import on_device as dev
from realkernels.codecs.arithmetic import fixed_signs, hadamard, half_away_from_zero, over, pack, unpack
from realkernels.codecs.codec import (
    PLANES,
    Part,
    PartLayout,
    Plane,
    Planes,
    RowCodec,
    Rows,
    check_multiple,
    check_power_of_two,
)
from realkernels.jit import stable_keys, tl, triton
from realkernels.kernels.arithmetic import centred_code, int8_halves, tiny_code
from realkernels.kernels.decode_form import (
    DecodeForm,
    plan_bytes,
    plan_columns,
    plan_small,
    plan_wide,
    wide_is_less,
)  # fmt: skip
from realkernels.kernels.decode_scaled import ScaledCodec, attend_scaled
from realkernels.kernels.decode_words import Codes, WordCodec, attend_words
from realkernels.kernels.split_kv import PlanCase, TilePlan

LEAST_SCALE = 1e-6
"""Keeps a row of zeros from dividing by zero."""

LEAST = tl.constexpr(LEAST_SCALE)
ZERO_MASK = 15
"""The bits of a scale that are int4's zero point."""


class PerTokenHead(RowCodec, ABC):
    """Codes and a float32 scale for K and for V."""

    arrangements = ("inline", "aligned")
    bits: ClassVar[int]

    def published(self, head_dim: int) -> tuple[PartLayout, ...]:
        """One tensor; page, head, token."""
        size = self.bits * head_dim // 8
        parts = [
            part
            for plane in PLANES
            for part in (Part(f"{plane}_data", torch.uint8, (size,)), Part(f"{plane}_scale", torch.float32))
        ]
        return (PartLayout("token_heads", tuple(parts), heads_first=True),)


def absmax_scale(rows: torch.Tensor, largest_code: float) -> torch.Tensor:
    """float32 [..., 1]: the largest magnitude over its code, at least LEAST_SCALE; NaN for a row that is not finite."""
    return _least(over(rows.abs().amax(dim=-1, keepdim=True), largest_code))


def _least(scale: torch.Tensor) -> torch.Tensor:
    scale = scale.clamp(min=LEAST_SCALE)
    return torch.where(scale.isfinite(), scale, float("nan"))


@triton.jit
def _at_least(scale):
    """LEAST_SCALE or more; NaN where it is not finite."""
    return dev.finite_or_nan(tl.where(scale < LEAST, LEAST, scale))


@triton.jit
def largest_scale(x, largest_code, ROWS: tl.constexpr):
    """`absmax_scale` [ROWS] of rows x [ROWS, elements]."""
    return _at_least(tl.div_rn(dev.largest_magnitude(x, 1), tl.full([ROWS], largest_code, tl.float32)))


@triton.jit
def _encode_int8(x, parts, place, there, keep, BITS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    scale = largest_scale(x, 127.0, ROWS)
    codes = dev.number_or(tl.div_rn(x, scale[:, None]), 0.0)
    codes = dev.between(dev.half_away_from_zero(codes), -127.0, 127.0).to(tl.int32)
    tl.store(dev.pointer(parts[1], place), scale, mask=there)
    dev.store_codes(dev.pointer(parts[0], place)[:, None], codes, keep, ROWS, WIDTH, 8)


@triton.jit
def dequantise_int8(out, parts, WAYS: tl.constexpr, place, live, BITS: tl.constexpr, WIDTH: tl.constexpr):
    """Codes times scales, of rows or of groups."""
    scale = dev.load_scale(parts, WAYS, 1, place, live)
    codes = dev.load_codes(parts, WAYS, 0, place, live, WIDTH)
    dev.store_row(out, codes.to(tl.int8, bitcast=True).to(tl.float32) * scale, live, WIDTH)


# Decode attention takes numbers as they are, in products of fp16 with fp32 sums; those of K may enter as (code + 128) /
# 2^24, whose constant part leaves the scores through the query's sum.


@triton.jit
def _key_halves(w, ASM: tl.constexpr):
    return int8_halves(w, False, ASM)


@triton.jit
def _halves(w, ASM: tl.constexpr):
    return int8_halves(w, True, ASM)


_DECODE_INT8 = DecodeForm(
    loop=attend_scaled, plan=plan_bytes,
    options={"codec": ScaledCodec(numbers=_halves, key_numbers=_key_halves, key_unit=2.0**24, key_shift=128.0)},
)  # fmt: skip


class Int8PerTokenHead(PerTokenHead):
    """Symmetric codes of -127 to 127."""

    bits = 8
    decode_form = _DECODE_INT8
    interleaved = dev.InterleavedKernels(dev.byte_numbers)
    kernels = dev.RowKernels(_encode_int8, dequantise_int8)

    def check(self, head_dim: int) -> None:
        """Inline scales lie on multiples of 4 B."""
        check_multiple(self.name, head_dim, 4)

    def encode(self, plane: Plane, rows: torch.Tensor, planes: Planes) -> Rows:
        """The largest element of a row has the code 127 or -127."""
        scale = absmax_scale(rows, 127.0)
        codes = half_away_from_zero((rows / scale).nan_to_num(0.0)).clamp(-127, 127)
        return {"data": codes.to(torch.int8).view(torch.uint8), "scale": scale.squeeze(-1)}

    def decode(self, plane: Plane, parts: Rows, planes: Planes) -> torch.Tensor:
        """Codes times the row's scale."""
        return parts["data"].contiguous().view(torch.int8).float() * parts["scale"][..., None]


def _clear(scales: torch.Tensor) -> torch.Tensor:
    """Scales without the zero point in their low bits."""
    return (scales.contiguous().view(torch.int32) & ~ZERO_MASK).view(torch.float32)


@triton.jit
def _encode_int4(x, parts, place, there, keep, BITS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    x = dev.hadamard(x * tl.load(parts[2][0] + tl.arange(0, WIDTH))[None, :], ROWS, WIDTH)
    lost = dev.largest_magnitude(x, 1)  # a minimum may drop NaN, this does not
    low, high = tl.minimum(tl.min(x, axis=1), 0.0), tl.maximum(tl.max(x, axis=1), 0.0)
    scale = _at_least(tl.div_rn(dev.nan_like(high - low, lost), tl.full([ROWS], 15.0, tl.float32)))
    bits = scale.to(tl.int32, bitcast=True) & -16
    scale = bits.to(tl.float32, bitcast=True)
    zero = dev.between(dev.nearest_even(dev.number_or(tl.div_rn(-low, scale), 0.0)), 0.0, 15.0)
    codes = dev.number_or(tl.div_rn(x, scale[:, None]) + zero[:, None], 0.0)
    codes = dev.between(dev.nearest_even(codes), 0.0, 15.0).to(tl.int32)
    marked = (bits | zero.to(tl.int32)).to(tl.float32, bitcast=True)
    tl.store(dev.pointer(parts[1], place), marked, mask=there)
    dev.store_codes(dev.pointer(parts[0], place)[:, None], codes, keep, ROWS, WIDTH, 4)


@triton.jit
def _dequantise_int4(out, parts, WAYS: tl.constexpr, place, live, BITS: tl.constexpr, WIDTH: tl.constexpr):
    marked = dev.load_scale(parts, WAYS, 1, place, live).to(tl.int32, bitcast=True)
    zero, scale = marked & 15, (marked & -16).to(tl.float32, bitcast=True)
    codes = dev.load_codes(parts, WAYS, 0, place, live, WIDTH // 2)
    low = ((codes & 15).to(tl.int32) - zero).to(tl.float32) * scale
    high = ((codes >> 4).to(tl.int32) - zero).to(tl.float32) * scale
    dev.store_pairs(out, low, high, live, WIDTH)


# Decode attention: k = (code - zero) scale, so that s = scale (q . code - zero sum(q)). Values: codes less 7.5, since a
# large sum would drown a small output, and sum(p v_scale (zero - 7.5)) is taken off at the end. No element is
# multiplied: a code costs a mask, half a shift, of V a subtraction.

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
def _zeros(k_scale, v_scale, _least, _v_zero):
    return _zero_point(k_scale), _zero_point(v_scale) - CENTRE


def _plan(case: PlanCase) -> TilePlan:
    """The fastest plan measured on an H200 (head_dim 256), and one that fits where shared memory is 100 KiB.

    More than 24 query rows are several blocks, of 24 or of 32.
    """
    if not case.large:
        return plan_small(case)
    if wide_is_less(case.q_rows, sets=3):
        return plan_wide(case)
    return plan_columns(case, tile=case.tile(of_256=128), num_warps=4, per_multiprocessor=2)


_DECODE_INT4 = DecodeForm(
    loop=attend_words, plan=_plan,
    options={"codec": WordCodec(key=Codes(number=_tiny), value=Codes(number=centred), zeros=_zeros, zero="code")},
)  # fmt: skip


@triton.jit
def _numbers(codes, scale, part):
    """Of interleaved blocks, less the zero point in the low bits of the scale."""
    x = ((codes >> (4 * part)) & 15).to(tl.float32)
    x -= (scale.to(tl.int32, bitcast=True) & 15).to(tl.float32)[:, None]
    return x


@triton.jit
def _factor(scale):
    """The scale without the zero point."""
    return (scale.to(tl.int32, bitcast=True) & -16).to(tl.float32, bitcast=True)


class Int4PerTokenHead(PerTokenHead):
    """Rotated, then asymmetric codes of 0 to 15."""

    bits = 4
    decode_form = _DECODE_INT4
    interleaved = dev.InterleavedKernels(_numbers, factor=_factor)
    kernels = dev.RowKernels(_encode_int4, _dequantise_int4)

    def check(self, head_dim: int) -> None:
        """Hadamard matrices and scales on multiples of 4 B."""
        check_power_of_two(self.name, head_dim, 8)

    def warm(self, head_dim: int, device: torch.device) -> None:
        """The signs."""
        fixed_signs(head_dim, device)

    def encode(self, plane: Plane, rows: torch.Tensor, planes: Planes) -> Rows:
        """Rotated here."""
        x = hadamard(rows * fixed_signs(rows.shape[-1], rows.device))
        low, high = x.amin(dim=-1, keepdim=True).clamp(max=0.0), x.amax(dim=-1, keepdim=True).clamp(min=0.0)
        scale = _clear(_least(over(high - low, 15.0)))
        zero = (-low / scale).nan_to_num(0.0).round().clamp(0, 15)
        codes = (x / scale + zero).nan_to_num(0.0).round().clamp(0, 15)
        marked = scale.view(torch.int32) | zero.to(torch.int32)
        return {"data": pack(codes, 4), "scale": marked.view(torch.float32).squeeze(-1)}

    def decode(self, plane: Plane, parts: Rows, planes: Planes) -> torch.Tensor:
        """Still rotated."""
        zero = parts["scale"].contiguous().view(torch.int32) & ZERO_MASK
        return (unpack(parts["data"], 4) - zero[..., None]).float() * _clear(parts["scale"])[..., None]

    def kernel_parts(self, plane: Plane, planes: Planes) -> tuple[torch.Tensor, ...]:
        """And the signs of the rotation."""
        return *super().kernel_parts(plane, planes), fixed_signs(planes.head_dim, planes.device)

    def rotate_query(self, query: torch.Tensor) -> torch.Tensor:
        """R q / D."""
        size = query.shape[-1]
        return (hadamard(query.float() * fixed_signs(size, query.device)) / size).to(query.dtype)

    def rotate_output(self, output: torch.Tensor) -> torch.Tensor:
        """The inverse of R; of keys, too."""
        size = output.shape[-1]
        return (hadamard(output.float()) / size * fixed_signs(size, output.device)).to(output.dtype)


CODECS = {"int8_per_token_head": Int8PerTokenHead, "int4_per_token_head": Int4PerTokenHead}

stable_keys(globals())
