"""K and V in 4 bits after a randomised Hadamard rotation, with a scale for each token and head that hides a zero point.

| bytes of a token and head, inline | content |
|---|---|
| 0 .. D / 2 - 1 | K codes: element 2 j in the low nibble of byte j, 2 j + 1 in the high one |
| D / 2 .. D / 2 + 3 | K scale, float32; its 4 lowest mantissa bits are the zero point |
| D / 2 + 4 .. D + 3 | V codes |
| D + 4 .. D + 7 | V scale and zero point |

Rotation R x = H (signs x), H of Sylvester's and not normalised, so that lengths grow by sqrt(D); K and V alike. Then
scale = (max - min) / 15, zero = round(-min / scale) in 0 .. 15, code = round(x / scale + zero), x = (code - zero) x
scale. Order, the aligned arrangement and NaN: `per_token_head.py`. Source: vLLM 0.28.0 `ops/int4_per_token_head.py`.

Three choices where the description is silent: the range is widened to hold 0 (only then does a zero point of 0 .. 15
fit it; a key along the first channel would be lost otherwise), a range of nothing has scale 1e-6, and the scale is the
float32 with its 4 low bits cleared. A kernel that leaves them in is off by 2^-19.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from realkernels.formats.arithmetic import fixed_signs, hadamard, over, pack, unpack
from realkernels.formats.format import check_power_of_two
from realkernels.formats.per_token_head import LEAST_SCALE, PerTokenHead, finite_or_nan

ZERO_MASK = 15


@dataclass(frozen=True, kw_only=True)
class Int4PerTokenHead(PerTokenHead):
    """Rotated, then asymmetric codes of 0 to 15."""

    bits: ClassVar[int] = 4

    def check(self, head_dim: int) -> None:
        """Hadamard matrices and scales on multiples of 4 B."""
        check_power_of_two(self.name, head_dim, 8)

    def warm(self, head_dim: int, device: torch.device) -> None:
        """The signs."""
        fixed_signs(head_dim, device)

    def quantise(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """uint8 [n, heads, D / 2] and float32 [n, heads] of rows that are not rotated yet."""
        x = hadamard(rows * fixed_signs(rows.shape[-1], rows.device))
        low, high = x.amin(dim=-1, keepdim=True).clamp(max=0.0), x.amax(dim=-1, keepdim=True).clamp(min=0.0)
        scale = clear(finite_or_nan(over(high - low, 15.0).clamp(min=LEAST_SCALE)))
        zero = (-low / scale).nan_to_num(0.0).round().clamp(0, 15)
        codes = (x / scale + zero).nan_to_num(0.0).round().clamp(0, 15)
        marked = scale.view(torch.int32) | zero.to(torch.int32)
        return pack(codes, 4), marked.view(torch.float32).squeeze(-1)

    def dequantise(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """float32 [n, heads, D], rotated."""
        zero = scales.contiguous().view(torch.int32) & ZERO_MASK
        return (unpack(codes, 4) - zero[..., None]).float() * clear(scales)[..., None]

    def rotate_query(self, query: torch.Tensor) -> torch.Tensor:
        """R q / D."""
        size = query.shape[-1]
        return (hadamard(query.float() * fixed_signs(size, query.device)) / size).to(query.dtype)

    def rotate_output(self, output: torch.Tensor) -> torch.Tensor:
        """The inverse of R."""
        size = output.shape[-1]
        return (hadamard(output.float()) / size * fixed_signs(size, output.device)).to(output.dtype)

    def rotate_back_keys(self, keys: torch.Tensor) -> torch.Tensor:
        """The inverse of R."""
        return self.rotate_output(keys)


def clear(scales: torch.Tensor) -> torch.Tensor:
    """Scales without the zero point in their low bits."""
    return (scales.contiguous().view(torch.int32) & ~ZERO_MASK).view(torch.float32)


FORMATS = {"int4_per_token_head": Int4PerTokenHead}
