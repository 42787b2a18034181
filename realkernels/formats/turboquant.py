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
from math import sqrt
from typing import ClassVar

import torch

from realkernels.formats.arithmetic import (
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
from realkernels.formats.format import RowFormat, Rows, check_multiple, check_power_of_two
from realkernels.formats.lloyd_max import centroids, midpoints
from realkernels.formats.planes import Arrangement, Part, Planes, Record

BITS = {
    "turboquant_k8v4": (8, 4),
    "turboquant_4bit_nc": (4, 4),
    "turboquant_k3v4_nc": (3, 4),
    "turboquant_3bit_nc": (3, 3),
}
"""Of K and of V; K in 8 bits is e4m3."""


@dataclass(frozen=True, kw_only=True)
class TurboQuant(RowFormat):
    """Slots of K, its norm, V, its scale and zero."""

    arrangements: ClassVar[tuple[Arrangement, ...]] = ("inline", "aligned")

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

    def published(self, head_dim: int) -> tuple[Record, ...]:
        """One tensor of slots; page, token, head."""
        norm = (Part("key_norm", torch.float16),) if self.rotated else ()
        parts = (
            Part("key_data", torch.uint8, (self.key_bits * head_dim // 8,)),
            *norm,
            Part("value_data", torch.uint8, (self.value_bits * head_dim // 8,)),
            Part("value_scale", torch.float16),
            Part("value_zero", torch.float16),
        )
        return (Record("slots", parts, pad_to=2),)

    def warm(self, head_dim: int, device: torch.device) -> None:
        """Centroids and the midpoints between them."""
        if self.rotated:
            midpoints(self.key_bits, head_dim, device)

    def centroids(self, head_dim: int, device: torch.device) -> torch.Tensor:
        """float32 [2^key_bits], ascending; ValueError where K has none."""
        if not self.rotated:
            raise ValueError(f"{self.name} keeps keys as e4m3, not as centroids")
        return centroids(self.key_bits, head_dim, device)

    def encode(self, planes: Planes, keys: torch.Tensor, values: torch.Tensor) -> Rows:  # noqa: ARG002
        """K by its direction and length (or e4m3), V by its range."""
        return {**self._encode_keys(keys), **self._encode_values(values)}

    def _encode_keys(self, keys: torch.Tensor) -> Rows:
        if not self.rotated:
            return {"key_data": to_e4m3(keys)}
        size, device = keys.shape[-1], keys.device
        length = norms(keys)
        direction = (hadamard(keys / length) * (1 / sqrt(size))).nan_to_num(0.0)
        codes = torch.bucketize(direction, midpoints(self.key_bits, size, device))
        factor = length / norms(centroids(self.key_bits, size, device)[codes])
        return {"key_data": pack(codes, self.key_bits), "key_norm": half_scale(factor).squeeze(-1)}

    def _encode_values(self, values: torch.Tensor) -> Rows:
        low, high = values.amin(dim=-1, keepdim=True), values.amax(dim=-1, keepdim=True)
        scale, zero = half_scale(over(high - low, 2.0**self.value_bits - 1)), half_scale(low)
        codes = affine_codes(values, scale.float(), zero.float(), self.value_bits)
        return {
            "value_data": pack(codes, self.value_bits),
            "value_scale": scale.squeeze(-1),
            "value_zero": zero.squeeze(-1),
        }

    def decode(self, planes: Planes, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """K rotated, V as it is."""
        if self.rotated:
            table = centroids(self.key_bits, planes.head_dim, planes.device)
            keys = table[unpack(rows["key_data"], self.key_bits)] * rows["key_norm"].float()[..., None]
        else:
            keys = from_e4m3(rows["key_data"])
        scale, zero = rows["value_scale"].float()[..., None], rows["value_zero"].float()[..., None]
        return keys, unpack(rows["value_data"], self.value_bits).float() * scale + zero

    def rotate_query(self, query: torch.Tensor) -> torch.Tensor:
        """Hadamard / sqrt(D), its own inverse; as it is where keys are."""
        if not self.rotated:
            return query
        return (hadamard(query.float()) * (1 / sqrt(query.shape[-1]))).to(query.dtype)

    def rotate_back_keys(self, keys: torch.Tensor) -> torch.Tensor:
        """The same once more."""
        return self.rotate_query(keys)


FORMATS = dict.fromkeys(BITS, TurboQuant)
