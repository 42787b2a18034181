"""K and V in float8 e4m3 with a float32 scale for each token and head.

| bytes of a token and head, inline | content |
|---|---|
| 0 .. D - 1 | K codes, e4m3fn |
| D .. D + 3 | K scale, float32 |
| D + 4 .. 2 D + 3 | V codes |
| 2 D + 4 .. 2 D + 7 | V scale |

scale = max(absmax / 448, 1e-6); x = e4m3(code) x scale, ties to even. Order, the aligned arrangement and NaN:
`per_token_head.py`. Source: vLLM 0.28.0 `ops/triton_reshape_and_cache_flash.py`; its kernels need SM 8.9.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from realkernels.formats.arithmetic import from_e4m3, to_e4m3
from realkernels.formats.format import check_multiple
from realkernels.formats.per_token_head import PerTokenHead, absmax_scale


@dataclass(frozen=True, kw_only=True)
class Fp8PerTokenHead(PerTokenHead):
    """The largest element of a row has the code 448."""

    bits: ClassVar[int] = 8

    def check(self, head_dim: int) -> None:
        """Inline scales lie on multiples of 4 B."""
        check_multiple(self.name, head_dim, 4)

    def quantise(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """uint8 [n, heads, D] and float32 [n, heads]."""
        scale = absmax_scale(rows, 448.0)
        return to_e4m3((rows / scale).nan_to_num(0.0)), scale.squeeze(-1)

    def dequantise(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """float32 [n, heads, D]."""
        return from_e4m3(codes) * scales[..., None]


FORMATS = {"fp8_per_token_head": Fp8PerTokenHead}
