"""K and V in int8 with a float32 scale for each token and head.

| bytes of a token and head, inline | content |
|---|---|
| 0 .. D - 1 | K codes, two's complement |
| D .. D + 3 | K scale, float32 |
| D + 4 .. 2 D + 3 | V codes |
| 2 D + 4 .. 2 D + 7 | V scale |

scale = max(absmax / 127, 1e-6); codes round half away from zero; x = code x scale. Order, the aligned arrangement and
NaN: `per_token_head.py`. Source: vLLM 0.28.0 `ops/triton_reshape_and_cache_flash.py`.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from realkernels.formats.format import check_multiple
from realkernels.formats.per_token_head import PerTokenHead, absmax_scale


@dataclass(frozen=True, kw_only=True)
class Int8PerTokenHead(PerTokenHead):
    """Symmetric codes of -127 to 127."""

    bits: ClassVar[int] = 8

    def check(self, head_dim: int) -> None:
        """Inline scales lie on multiples of 4 B."""
        check_multiple(self.name, head_dim, 4)

    def quantise(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """uint8 [n, heads, D] and float32 [n, heads]."""
        scale = absmax_scale(rows, 127.0)
        codes = half_away_from_zero((rows / scale).nan_to_num(0.0)).clamp(-127, 127)
        return codes.to(torch.int8).view(torch.uint8), scale.squeeze(-1)

    def dequantise(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """float32 [n, heads, D]."""
        return codes.view(torch.int8).float() * scales[..., None]


def half_away_from_zero(x: torch.Tensor) -> torch.Tensor:
    """The nearest integer; of two as near, the larger in magnitude."""
    whole = x.trunc()
    return whole + torch.where((x - whole).abs() >= 0.5, x.sign(), 0.0)


FORMATS = {"int8_per_token_head": Int8PerTokenHead}
