"""TurboQuant: K as a length and centroids of its rotated direction (or as e4m3), V between its minimum and maximum.

| bytes of a slot, inline | content | k8v4 | 4bit_nc | k3v4_nc | 3bit_nc |
|---|---|---|---|---|---|
| K codes | e4m3fn, or b-bit numbers of centroids | D | D / 2 | 3 D / 8 | 3 D / 8 |
| K norm | float16 | none | 2 | 2 | 2 |
| V codes | b bits | D / 2 | D / 2 | D / 2 | 3 D / 8 |
| V scale, V zero | float16 each | 4 | 4 | 4 | 4 |

Slots are rounded up to even bytes and lie page, token, head; aligned, each row of the table is a plane of its own, in
the order page, head, token. Codes are little-endian streams: the first of two 4-bit codes in the low nibble, eight
3-bit codes in 3 bytes. Source: vLLM 0.28.0 `quantization/turboquant/`; the order of the parts within a slot is this
project's.

K of the `_nc` formats: the vector over its length is rotated by Hadamard / sqrt(D); each coordinate gets the nearest of
2^b Lloyd-Max centroids for N(0, 1 / D), found by the midpoints between them. Norm correction: the vector of centroids
is brought to length 1. That factor is known when a key is written, so the float16 holds length / |centroids| and a
kernel needs no sum over a head: x = centroid[code] x key_norm. V: scale = (max - min) / (2^b - 1), x = code x scale +
zero; it is not rotated. K of k8v4 is neither rotated nor scaled.

A K row with NaN, infinity or a length beyond 65,504 is NaN as a whole, and so is such a V row: that token and head
only. e4m3 keys saturate at 448, infinities too, and keep NaN, element by element.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import erfc, exp, pi, sqrt
from typing import ClassVar

import torch

from realkernels.codecs import on_device as dev
from realkernels.codecs.arithmetic import (
    affine_codes,
    from_e4m3,
    hadamard,
    half_scale,
    norms,
    over,
    pack,
    to_e4m3,
    unpack,
)  # fmt: skip
from realkernels.codecs.codec import (
    PLANES,
    Arrangement,
    Part,
    PartLayout,
    Plane,
    Planes,
    RowCodec,
    Rows,
    check_multiple,
    check_power_of_two,
)  # fmt: skip
from realkernels.codecs.per_token_head import CENTRE, centred
from realkernels.jit import stable_keys, tl, triton
from realkernels.kernels.arithmetic import odd_polynomial
from realkernels.kernels.decode_form import (
    LEAST_ASYNCHRONOUS,
    DecodeForm,
    plan_columns,
    plan_rows,
    plan_small,
    plan_wide,
)  # fmt: skip
from realkernels.kernels.decode_words import Codes, WordCodec, attend_words
from realkernels.kernels.split_kv import PlanCase, TilePlan

BITS = {
    "turboquant_k8v4": (8, 4),
    "turboquant_4bit_nc": (4, 4),
    "turboquant_k3v4_nc": (3, 4),
    "turboquant_3bit_nc": (3, 3),
}
"""Of K and of V; K in 8 bits is e4m3."""

ON_DEVICE = "turboquant_4bit_nc"
"""The one that kernels dequantise."""


@dataclass(frozen=True, kw_only=True)
class TurboQuant(RowCodec):
    """Slots of K, its norm, V, its scale and zero."""

    arrangements: ClassVar[tuple[Arrangement, ...]] = ("inline", "aligned")

    @property
    def decode_form(self) -> DecodeForm | None:
        """Of 4 bits alone."""
        return DECODE if self.name == ON_DEVICE else None

    @property
    def key_bits(self) -> int:
        """Of a code of K."""
        return BITS[self.name][0]

    @property
    def value_bits(self) -> int:
        """Of a code of V."""
        return BITS[self.name][1]

    @property
    def rotated(self) -> bool:
        """Whether K is; V never is."""
        return self.key_bits < 8

    def check(self, head_dim: int) -> None:
        """Hadamard matrices, and parts that begin on even bytes."""
        if self.rotated:
            check_power_of_two(self.name, head_dim, 16)
        check_multiple(self.name, head_dim, 16)

    def published(self, head_dim: int) -> tuple[PartLayout, ...]:
        """One tensor of slots; page, token, head."""
        norm = (Part("key_norm", torch.float16),) if self.rotated else ()
        parts = (
            Part("key_data", torch.uint8, (self.key_bits * head_dim // 8,)),
            *norm,
            Part("value_data", torch.uint8, (self.value_bits * head_dim // 8,)),
            Part("value_scale", torch.float16),
            Part("value_zero", torch.float16),
        )
        return (PartLayout("slots", parts, pad_to=2),)

    def warm(self, head_dim: int, device: torch.device) -> None:
        """Centroids and the midpoints between them."""
        if self.rotated:
            midpoints(self.key_bits, head_dim, device)

    def centroids(self, head_dim: int, device: torch.device) -> torch.Tensor:
        """float32 [2^key_bits], ascending; ValueError where K has none."""
        if not self.rotated:
            raise ValueError(f"{self.name} keeps keys as e4m3, not as centroids")
        return centroids(self.key_bits, head_dim, device)

    def encode(self, plane: Plane, rows: torch.Tensor, planes: Planes) -> Rows:
        """K by its direction and length (or e4m3), V by its range."""
        return self._encode_keys(rows) if plane == "key" else self._encode_values(rows)

    def _encode_keys(self, keys: torch.Tensor) -> Rows:
        if not self.rotated:
            return {"data": to_e4m3(keys)}
        size, device = keys.shape[-1], keys.device
        length = norms(keys)
        direction = (hadamard(keys / length) * (1 / sqrt(size))).nan_to_num(0.0)
        codes = torch.bucketize(direction, midpoints(self.key_bits, size, device))
        factor = length / norms(centroids(self.key_bits, size, device)[codes])
        return {"data": pack(codes, self.key_bits), "norm": half_scale(factor).squeeze(-1)}

    def _encode_values(self, values: torch.Tensor) -> Rows:
        low, high = values.amin(dim=-1, keepdim=True), values.amax(dim=-1, keepdim=True)
        scale, zero = half_scale(over(high - low, 2.0**self.value_bits - 1)), half_scale(low)
        codes = affine_codes(values, scale.float(), zero.float(), self.value_bits)
        return {"data": pack(codes, self.value_bits), "scale": scale.squeeze(-1), "zero": zero.squeeze(-1)}

    def decode(self, plane: Plane, parts: Rows, planes: Planes) -> torch.Tensor:
        """K rotated, V as it is."""
        if plane == "value":
            codes = unpack(parts["data"], self.value_bits).float()
            return codes * parts["scale"].float()[..., None] + parts["zero"].float()[..., None]
        if not self.rotated:
            return from_e4m3(parts["data"])
        table = centroids(self.key_bits, planes.head_dim, planes.device)
        return table[unpack(parts["data"], self.key_bits)] * parts["norm"].float()[..., None]

    def kernels_of(self, plane: Plane) -> dev.RowKernels:
        """4 bits alone are dequantised."""
        if plane == "key":
            encode, dequantise = _encode_keys if self.rotated else _encode_e4m3, _dequantise_keys
        else:
            encode, dequantise = _encode_values, _dequantise_values
        bits = BITS[self.name][PLANES.index(plane)]
        return dev.RowKernels(encode, dequantise if self.name == ON_DEVICE else None, bits)

    def kernel_parts(self, plane: Plane, planes: Planes) -> tuple[torch.Tensor, ...]:
        """K: codes, norms, centroids and what lies between them. V: codes, scales, zeros."""
        if plane == "value":
            return tuple(planes.parts[f"value_{name}"] for name in ("data", "scale", "zero"))
        if not self.rotated:
            return (planes.parts["key_data"],)
        tables = (table(self.key_bits, planes.head_dim, planes.device) for table in (centroids, midpoints))
        return planes.parts["key_data"], planes.parts["key_norm"], *tables

    def rotate_query(self, query: torch.Tensor) -> torch.Tensor:
        """Hadamard / sqrt(D), its own inverse; as it is where keys are."""
        if not self.rotated:
            return query
        return (hadamard(query.float()) * (1 / sqrt(query.shape[-1]))).to(query.dtype)

    def rotate_back_keys(self, keys: torch.Tensor) -> torch.Tensor:
        """The same once more."""
        return self.rotate_query(keys)


@lru_cache(maxsize=8)
def unit_centroids(bits: int) -> tuple[float, ...]:
    """2^bits centroids for N(0, 1), ascending and symmetric, after Lloyd and Max: computed, not copied.

    Each is the mean of its cell, cut half-way to its neighbours: the scalar quantiser of least mean squared error for a
    normal variable. ValueError below 1 and above 8 bits.
    """
    if not 1 <= bits <= 8:
        raise ValueError(f"{bits} bits: centroids are computed for 1 to 8")
    count = 2 ** (bits - 1)  # of the positive half; the other is its mirror image
    values = [4.0 * (index + 0.5) / count for index in range(count)]
    moved = 1.0
    while moved > 1e-12:
        edges = [0.0, *((low + high) / 2 for low, high in pairwise(values)), float("inf")]
        means = [_mean(low, high) for low, high in pairwise(edges)]
        moved = max(abs(new - old) for new, old in zip(means, values, strict=True))
        values = means
    return (*(-value for value in reversed(values)), *values)


def _mean(low: float, high: float) -> float:
    """Of N(0, 1) between two positive values."""
    density = (exp(-low * low / 2) - exp(-high * high / 2)) / sqrt(2 * pi)
    return density / ((erfc(low / sqrt(2)) - erfc(high / sqrt(2))) / 2)


@lru_cache(maxsize=64)
def centroids(bits: int, head_dim: int, device: torch.device) -> torch.Tensor:
    """float32 [2^bits] for N(0, 1 / head_dim), one coordinate of a rotated vector of length 1."""
    return torch.tensor([value / sqrt(head_dim) for value in unit_centroids(bits)], dtype=torch.float32, device=device)


@lru_cache(maxsize=64)
def midpoints(bits: int, head_dim: int, device: torch.device) -> torch.Tensor:
    """float32 [2^bits - 1]: where one cell ends and the next begins."""
    table = centroids(bits, head_dim, device)
    return (table[1:] + table[:-1]) / 2


@triton.jit
def _lengths(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """[ROWS, 1]: Euclidean."""
    return tl.sqrt_rn(dev.sum_of_columns(x * x, ROWS, WIDTH))


@triton.jit
def _encode_e4m3(x, parts, place, there, keep, BITS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    dev.store_codes(dev.pointer(parts[0], place)[:, None], dev.e4m3_bits(x), keep, ROWS, WIDTH, 8)


@triton.jit
def _encode_keys(x, parts, place, there, keep, BITS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    length = _lengths(x, ROWS, WIDTH)
    direction = dev.number_or(dev.hadamard(tl.div_rn(x, length), ROWS, WIDTH) * dev.one_over_root(WIDTH), 0.0)
    codes = tl.zeros([ROWS, WIDTH], tl.int32)
    for number in tl.static_range((1 << BITS) - 1):
        codes += (direction > tl.load(parts[3][0] + number)).to(tl.int32)
    factor = tl.div_rn(length, _lengths(tl.load(parts[2][0] + codes), ROWS, WIDTH))
    tl.store(dev.pointer(parts[1], place)[:, None], dev.half_scale(factor), mask=there[:, None])
    dev.store_codes(dev.pointer(parts[0], place)[:, None], codes, keep, ROWS, WIDTH, BITS)


@triton.jit
def _encode_values(x, parts, place, there, keep, BITS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    worst = dev.largest_magnitude(x, 1)
    low, high = tl.min(tl.where(keep, x, float("inf")), axis=1), tl.max(tl.where(keep, x, float("-inf")), axis=1)
    low, high = dev.nan_like(low, worst), dev.nan_like(high, worst)
    scale = dev.half_scale(tl.div_rn(high - low, tl.full([ROWS], (1 << BITS) - 1.0, tl.float32)))
    zero = dev.half_scale(low)
    codes = dev.affine_codes(x, scale.to(tl.float32)[:, None], zero.to(tl.float32)[:, None], BITS)
    tl.store(dev.pointer(parts[1], place), scale, mask=there)
    tl.store(dev.pointer(parts[2], place), zero, mask=there)
    dev.store_codes(dev.pointer(parts[0], place)[:, None], codes, keep, ROWS, WIDTH, BITS)


@triton.jit
def _dequantise_keys(out, parts, WAYS: tl.constexpr, place, live, BITS: tl.constexpr, WIDTH: tl.constexpr):
    norm, table = dev.load_scale(parts, WAYS, 1, place, live), parts[2]
    codes = dev.load_codes(parts, WAYS, 0, place, live, WIDTH // 2)
    low, high = tl.load(table + (codes & 15).to(tl.int32)) * norm, tl.load(table + (codes >> 4).to(tl.int32)) * norm
    dev.store_pairs(out, low, high, live, WIDTH)


@triton.jit
def _dequantise_values(out, parts, WAYS: tl.constexpr, place, live, BITS: tl.constexpr, WIDTH: tl.constexpr):
    scale, zero = dev.load_scale(parts, WAYS, 1, place, live), dev.load_scale(parts, WAYS, 2, place, live)
    codes = dev.load_codes(parts, WAYS, 0, place, live, WIDTH // 2)
    low, high = (codes & 15).to(tl.float32) * scale + zero, (codes >> 4).to(tl.float32) * scale + zero
    dev.store_pairs(out, low, high, live, WIDTH)


# Decode attention: centroids of a normal variable are nearly an odd polynomial of (code - 7.5): x (a + b x^2 + x^6) in
# fp16, found for the 16 numbers, misses them by 1.9e-3 of a standard deviation (root of the mean square; 5.2e-3 at
# most), against 9.7e-2 by which centroids miss what they stand for: it adds 4e-4 of that to the squared error. key_norm
# holds norm / |centroids|, so that norms multiply scores. Values: codes less 7.5; sum(p (zero + 7.5 scale)) is added at
# the end.

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


DECODE = DecodeForm(
    loop=attend_words, plan=_plan,
    options={
        "codec": WordCodec(
            key=Codes(number=centroid), value=Codes(number=centred), zeros=_zeros, zero="value",
            planes=("key_norm", "value_scale", "value_zero"), score_unit=lambda head_dim: UNIT / sqrt(head_dim),
        ),
    },
)  # fmt: skip

CODECS = dict.fromkeys(BITS, TurboQuant)

stable_keys(globals())
