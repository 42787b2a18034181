"""K and V as they are: fp16, bf16, fp32.

| plane | bytes of a token and head | order |
|---|---|---|
| key_data | D elements | page, token, head |
| value_data | D elements | page, token, head |

Source: exllamav3's fp16 cache, 2 x 2 x 256 x 2 B = 2,048 B a token at 2 heads of 256; vLLM's bf16.

NaN and infinity are kept as they come; what exceeds float16 becomes infinite. Either stays within its element.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from realkernels.formats.format import RowFormat, Rows, check_multiple
from realkernels.formats.planes import Arrangement, Part, Planes, Record

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class Plain(RowFormat):
    """Elements of one type."""

    arrangements: ClassVar[tuple[Arrangement, ...]] = ("aligned",)

    @property
    def dtype(self) -> torch.dtype:
        """Of an element."""
        return DTYPES[self.name]

    def check(self, head_dim: int) -> None:
        """Any head size fits."""
        check_multiple(self.name, head_dim, 1)

    def published(self, head_dim: int) -> tuple[Record, ...]:
        """Two planes."""
        return tuple(Record(name, (Part(name, self.dtype, (head_dim,)),)) for name in ("key_data", "value_data"))

    def encode(self, planes: Planes, keys: torch.Tensor, values: torch.Tensor) -> Rows:  # noqa: ARG002
        """Rounded to the type."""
        return {"key_data": keys.to(self.dtype), "value_data": values.to(self.dtype)}

    def decode(self, planes: Planes, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ARG002
        """As float32."""
        return rows["key_data"].float(), rows["value_data"].float()


FORMATS = dict.fromkeys(DTYPES, Plain)
