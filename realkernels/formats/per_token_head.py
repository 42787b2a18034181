"""What the three formats with a float32 scale for each token and head share: where codes and scales lie.

| arrangement | tensor | bytes |
|---|---|---|
| inline | token_heads uint8 [page, head, token, 2 (C + 4)] | K codes [C], K float32 scale, V codes, V scale |
| aligned | key_data, value_data uint8 [page, head, token, C] | codes |
| aligned | key_scale, value_scale float32 [page, head, token] | scales |

C bytes of codes: D for 8 bits, D / 2 for 4. Inline a head of 256 in 8 bits has 260 B, so that every other one begins 4
B off a 16 B boundary. Source: vLLM 0.28.0 `v1/attention/backends/triton_attn.py`.

A row of K or of V that holds NaN or infinity gets the scale NaN and is NaN as a whole: that token, head and plane only.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from realkernels.formats.arithmetic import over
from realkernels.formats.format import RowFormat, Rows
from realkernels.formats.planes import Arrangement, Part, Planes, Record

LEAST_SCALE = 1e-6
"""Keeps a row of zeros from dividing by zero."""


@dataclass(frozen=True, kw_only=True)
class PerTokenHead(RowFormat):
    """Codes and a float32 scale for K and for V."""

    arrangements: ClassVar[tuple[Arrangement, ...]] = ("inline", "aligned")
    bits: ClassVar[int]

    @abstractmethod
    def quantise(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """uint8 [n, heads, C] and float32 [n, heads] of float32 [n, heads, D]."""

    @abstractmethod
    def dequantise(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """float32 [n, heads, D] in the stored basis."""

    def published(self, head_dim: int) -> tuple[Record, ...]:
        """One tensor; page, head, token."""
        size = self.bits * head_dim // 8
        parts = [
            part
            for plane in ("key", "value")
            for part in (Part(f"{plane}_data", torch.uint8, (size,)), Part(f"{plane}_scale", torch.float32))
        ]
        return (Record("token_heads", tuple(parts), heads_first=True),)

    def encode(self, planes: Planes, keys: torch.Tensor, values: torch.Tensor) -> Rows:  # noqa: ARG002
        """Both planes alike."""
        (key_data, key_scale), (value_data, value_scale) = self.quantise(keys), self.quantise(values)
        return {"key_data": key_data, "key_scale": key_scale, "value_data": value_data, "value_scale": value_scale}

    def decode(self, planes: Planes, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ARG002
        """Both planes alike."""
        keys = self.dequantise(rows["key_data"], rows["key_scale"])
        return keys, self.dequantise(rows["value_data"], rows["value_scale"])


def finite_or_nan(scales: torch.Tensor) -> torch.Tensor:
    """NaN where a scale is not finite."""
    return torch.where(scales.isfinite(), scales, float("nan"))


def absmax_scale(rows: torch.Tensor, largest_code: float) -> torch.Tensor:
    """float32 [..., 1]: the largest magnitude over its code, at least LEAST_SCALE; NaN for a row that is not finite."""
    return finite_or_nan(over(rows.abs().amax(dim=-1, keepdim=True), largest_code).clamp(min=LEAST_SCALE))
