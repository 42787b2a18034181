"""exllamav3's quantised cache: K and V in 2 to 8 bits each, in rotated groups of 32 with a float16 scale.

| tensor | type and shape | bytes of a token |
|---|---|---|
| qk | int32 [page, token, H D / 32 x k bits] | H D k / 8 |
| sk | float16 [page, token, H D / 32] | H D / 16 |
| qv | int32 [page, token, H D / 32 x v bits] | H D v / 8 |
| sv | float16 [page, token, H D / 32] | H D / 16 |

Groups of 32 along the flattened head and dim axes; each is rotated by Sylvester's H32 / sqrt(32), scaled by its largest
magnitude in float16, and quantised linearly. The b words of a group are one little-endian stream: code i at bits
[b i, b (i + 1)) of 32 b. Source: exllamav3's `exllamav3_ext/cache/q_cache_kernels.cuh`, from a description of it.

It leaves the levels open: here they are the middles of 2^b equal cells of [-scale, scale], which has the
least largest error, scale / 2^b: code = floor((x / scale + 1) 2^b / 2), x = scale x ((2 code + 1) / 2^b - 1).

A group that holds NaN or infinity, or exceeds 65,504 when rotated, has the scale NaN: those 32 elements of that token
only.
"""

from functools import partial
from math import sqrt

import torch

from realkernels.codecs import on_device as dev
from realkernels.codecs.arithmetic import hadamard, half_scale, pack, unpack
from realkernels.codecs.codec import PLANES, Part, PartLayout, Plane, Planes, RowCodec, Rows, check_multiple
from realkernels.jit import tl, triton
from realkernels.kernels.arithmetic import scaled_code
from realkernels.kernels.decode_form import DecodeForm, plan_groups
from realkernels.kernels.decode_words import Codes, WordCodec, attend_words

GROUP = 32
BITS = {f"exl3_k{key}v{value}": (key, value) for key in range(2, 9) for value in range(2, 9)}
ON_DEVICE = (4, 8)
"""Bits that a kernel dequantises."""


@triton.jit
def _store_words(at, codes, keep, BITS: tl.constexpr):
    """32 codes a row, int32 [ROWS, 32] below 2^BITS, as BITS words behind the int32 pointers `at` [ROWS] where `keep`.

    Code i has the bits from BITS x i on, so that one may lie in two words.
    """
    first = tl.arange(0, 32)[None, :] * BITS
    for number in tl.static_range(BITS):
        shift = first - 32 * number
        above = tl.where((shift >= 0) & (shift < 32), codes << (shift & 31), 0)
        below = tl.where((shift < 0) & (shift > -BITS), codes >> ((-shift) & 31), 0)
        tl.store(at + number, tl.sum(above | below, axis=1), mask=keep)


@triton.jit
def _encode(x, parts, place, there, keep, BITS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    x = dev.hadamard(x, ROWS, WIDTH) * dev.one_over_root(WIDTH)
    scale = dev.half_scale(dev.largest_magnitude(x, 1))
    cells = (tl.div_rn(x, scale.to(tl.float32)[:, None]) + 1.0) * (1 << (BITS - 1))
    codes = dev.between(tl.floor(dev.number_or(cells, 0.0)), 0.0, (1 << BITS) - 1.0).to(tl.int32)
    _store_words(dev.pointer(parts[2], place), codes, there, BITS)
    tl.store(dev.pointer(parts[1], place), scale, mask=there)


@triton.jit
def _levels(codes, scale, BITS: tl.constexpr):
    return ((2.0 * codes.to(tl.float32) + 1.0) / (1.0 * (1 << BITS)) - 1.0) * scale


@triton.jit
def _dequantise(out, parts, WAYS: tl.constexpr, place, live, BITS: tl.constexpr, WIDTH: tl.constexpr):
    scale = dev.load_scale(parts, WAYS, 1, place, live)
    codes = dev.load_codes(parts, WAYS, 0, place, live, WIDTH * BITS // 8)
    if BITS == 4:
        dev.store_pairs(out, _levels(codes & 15, scale, 4), _levels(codes >> 4, scale, 4), live, WIDTH)
    else:
        dev.store_row(out, _levels(codes, scale, 8), live, WIDTH)


@triton.jit
def _scaled_4(w, scale, number: tl.constexpr, ASM: tl.constexpr):
    return scaled_code(w, scale, number, 4, 7.5, 0, ASM)


@triton.jit
def _scaled_8(w, scale, number: tl.constexpr, ASM: tl.constexpr):
    return scaled_code(w, scale, number, 2, 127.5, 0, ASM)


CODES = {4: Codes(number=_scaled_4, unit=1 / 8), 8: Codes(number=_scaled_8, per_word=2, unit=1 / 128)}
DECODE = {
    (key, value): DecodeForm(
        loop=attend_words, plan=partial(plan_groups, wide_codes=8 in (key, value)),
        options={"codec": WordCodec(key=CODES[key], value=CODES[value])},
    )
    for key in ON_DEVICE for value in ON_DEVICE
}  # fmt: skip
"""By the bits of K and of V: codes stand for evenly spaced numbers about zero."""


@triton.jit
def _numbers(codes, scale, part):
    """Of interleaved blocks of 4-bit codes."""
    x = ((codes >> (4 * part)) & 15).to(tl.float32)
    return x * 0.125 - 0.9375


class Exl3(RowCodec):
    """Four planes: words and scales of K and of V."""

    arrangements = ("aligned",)
    group = GROUP

    @property
    def decode_form(self) -> DecodeForm | None:
        """Of 4 and 8 bits."""
        return DECODE.get(BITS[self.name])

    @property
    def interleaved(self) -> dev.InterleavedKernels | None:
        """Of 4 bits."""
        return dev.InterleavedKernels(_numbers) if BITS[self.name] == (4, 4) else None

    def bits(self, plane: Plane) -> int:
        """Of a code."""
        return BITS[self.name][PLANES.index(plane)]

    def check(self, head_dim: int) -> None:
        """Groups lie within heads, so that a query can be rotated."""
        check_multiple(self.name, head_dim, GROUP)

    def published(self, head_dim: int) -> tuple[PartLayout, ...]:
        """Words as bytes: the same memory."""
        groups = (head_dim // GROUP,)
        return tuple(
            layout
            for plane in PLANES
            for layout in (
                PartLayout(f"q{plane[0]}", (Part(f"{plane}_data", torch.uint8, (4 * self.bits(plane),)),), groups),
                PartLayout(f"s{plane[0]}", (Part(f"{plane}_scale", torch.float16),), groups),
            )
        )

    def allocate(self, pages: int, page_tokens: int, kv_heads: int, head_dim: int, device: torch.device) -> Planes:
        """Planes of zeros, the tensors in their published shapes; ValueError for sizes that do not fit."""
        planes = super().allocate(pages, page_tokens, kv_heads, head_dim, device)
        for name, tensor in planes.tensors.items():
            planes.tensors[name] = tensor.flatten(2) if name in {"sk", "sv"} else tensor.flatten(2).view(torch.int32)
        return planes

    def views(self, planes: Planes) -> Rows:
        """Beside the bytes key_words and value_words int32 [page, head, token, group, bits], the same memory."""
        words = {f"{plane}_words": planes.parts[f"{plane}_data"].view(torch.int32) for plane in PLANES}
        return {**super().views(planes), **words}

    def encode(self, plane: Plane, rows: torch.Tensor, planes: Planes) -> Rows:
        """Rotate, scale, quantise, pack."""
        bits = self.bits(plane)
        x = hadamard(rows.unflatten(-1, (-1, GROUP))) * (1 / sqrt(GROUP))
        scale = half_scale(x.abs().amax(dim=-1, keepdim=True))
        cells = ((x / scale.float() + 1) * 2 ** (bits - 1)).nan_to_num(0.0).floor()
        return {"data": pack(cells.clamp(0, 2**bits - 1), bits), "scale": scale.squeeze(-1)}

    def decode(self, plane: Plane, parts: Rows, planes: Planes) -> torch.Tensor:
        """Groups put together, rotated as they are."""
        bits = self.bits(plane)
        levels = (2 * unpack(parts["data"], bits) + 1).float() / 2**bits - 1
        return (levels * parts["scale"].float()[..., None]).flatten(-2)

    def kernels_of(self, plane: Plane) -> dev.RowKernels:
        """Whole bytes and nibbles alone are dequantised."""
        bits = self.bits(plane)
        return dev.RowKernels(_encode, _dequantise if bits in ON_DEVICE else None, bits)

    def kernel_parts(self, plane: Plane, planes: Planes) -> tuple[torch.Tensor, ...]:
        """Bytes, scales, and the bytes as words."""
        views = self.views(planes)
        return views[f"{plane}_data"], views[f"{plane}_scale"], views[f"{plane}_words"]

    def rotate_query(self, query: torch.Tensor) -> torch.Tensor:
        """H32 / sqrt(32) over each 32 elements, its own inverse."""
        groups = query.float().unflatten(-1, (-1, GROUP))
        return (hadamard(groups) * (1 / sqrt(GROUP))).flatten(-2).to(query.dtype)

    def rotate_output(self, output: torch.Tensor) -> torch.Tensor:
        """The same once more; of keys, too."""
        return self.rotate_query(output)


CODECS = dict.fromkeys(BITS, Exl3)
