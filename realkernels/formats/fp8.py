"""K and V in float8 e4m3 with one scale a layer and plane.

| plane | bytes of a token and head | order |
|---|---|---|
| key_data | D e4m3fn | page, token, head |
| value_data | D e4m3fn | page, token, head |
| key_scale, value_scale | float32 [1] a layer, in the sidecar | |

x = e4m3(code) x scale; the scales begin at 1 and are set once, before the first token. Source: vLLM 0.28.0, `fp8`.

Saturating: what exceeds 448 scales, infinities included, becomes 448 scales; NaN stays NaN. Either stays within its
element.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from realkernels.formats.arithmetic import from_e4m3, to_e4m3
from realkernels.formats.format import RowFormat, Rows, check_multiple
from realkernels.formats.planes import Arrangement, Part, Planes, Record


@dataclass(frozen=True, kw_only=True)
class Fp8(RowFormat):
    """e4m3 by a scale of the layer's."""

    arrangements: ClassVar[tuple[Arrangement, ...]] = ("aligned",)

    def check(self, head_dim: int) -> None:
        """Any head size fits."""
        check_multiple(self.name, head_dim, 1)

    def published(self, head_dim: int) -> tuple[Record, ...]:
        """Two planes."""
        return tuple(Record(name, (Part(name, torch.uint8, (head_dim,)),)) for name in ("key_data", "value_data"))

    def sidecar(self, device: torch.device) -> Rows:
        """The two scales, 1."""
        return {name: torch.ones(1, device=device) for name in ("key_scale", "value_scale")}

    def set_scales(self, planes: Planes, *, key: float, value: float) -> None:
        """Before the first token: what is written already keeps its codes and would change its values."""
        for name, scale in (("key_scale", key), ("value_scale", value)):
            if not 0 < scale < float("inf"):
                raise ValueError(f"{name} is {scale}: give a positive, finite one")
            planes.sidecar[name].fill_(scale)

    def encode(self, planes: Planes, keys: torch.Tensor, values: torch.Tensor) -> Rows:
        """Nearest codes, ties to even."""
        side = planes.sidecar
        return {"key_data": to_e4m3(keys / side["key_scale"]), "value_data": to_e4m3(values / side["value_scale"])}

    def decode(self, planes: Planes, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes times the layer's scales."""
        side = planes.sidecar
        return from_e4m3(rows["key_data"]) * side["key_scale"], from_e4m3(rows["value_data"]) * side["value_scale"]


FORMATS = {"fp8": Fp8}
