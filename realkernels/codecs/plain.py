"""K and V as they are: fp16, bf16, fp32.

| plane | bytes of a token and head | order |
|---|---|---|
| key_data | D elements | page, token, head |
| value_data | D elements | page, token, head |

Source: exllamav3's fp16 cache, 2 x 2 x 256 x 2 B = 2,048 B a token at 2 heads of 256; vLLM's bf16.

NaN and infinity are kept as they come; what exceeds float16 becomes infinite. Either stays within its element.
"""

import torch

from realkernels.codecs import on_device as dev
from realkernels.codecs.codec import Part, PartLayout, Plane, Planes, RowCodec, Rows, check_multiple
from realkernels.jit import tl, triton
from realkernels.kernels.decode_form import DecodeForm
from realkernels.kernels.decode_plain import attend_plain
from realkernels.kernels.split_kv import PlanCase, TilePlan

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


@triton.jit
def _encode(x, parts, place, there, keep, BITS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    at = dev.pointer(parts[0], place)[:, None] + tl.arange(0, WIDTH)[None, :]
    if at.dtype.element_ty == tl.bfloat16:  # noqa: SIM108 - a branch of the compiler's
        y = dev.bfloat16(x)
    else:
        y = x.to(at.dtype.element_ty)
    tl.store(at, y, mask=keep)


@triton.jit
def _dequantise(out, parts, WAYS: tl.constexpr, place, live, BITS: tl.constexpr, WIDTH: tl.constexpr):
    dev.store_row(out, dev.load_codes(parts, WAYS, 0, place, live, WIDTH), live, WIDTH)


def _plan(case: PlanCase) -> TilePlan:
    """The fastest plan measured on an H200 (head_dim 256), and one that fits where shared memory is 100 KiB.

    More than 64 query rows are several blocks that read a tile each.
    """
    stages = 3 if case.large else 2
    if case.q_rows <= 16:
        return TilePlan(tile=case.tile(of_256=64), rows=16, num_warps=4, stages=stages, per_multiprocessor=1)
    return TilePlan(tile=case.tile(of_256=32), rows=64, num_warps=4, stages=stages, per_multiprocessor=1, wide=False)


DECODE = DecodeForm(loop=attend_plain, plan=_plan)


class Plain(RowCodec):
    """Elements of one type."""

    arrangements = ("aligned",)
    kernels = dev.RowKernels(_encode, _dequantise, most_tokens=8192)

    @property
    def decode_form(self) -> DecodeForm | None:
        """Of 16 bits."""
        return None if self.name == "fp32" else DECODE

    @property
    def dtype(self) -> torch.dtype:
        """Of an element."""
        return DTYPES[self.name]

    def check(self, head_dim: int) -> None:
        """Any head size fits."""
        check_multiple(self.name, head_dim, 1)

    def published(self, head_dim: int) -> tuple[PartLayout, ...]:
        """Two planes."""
        return tuple(PartLayout(name, (Part(name, self.dtype, (head_dim,)),)) for name in ("key_data", "value_data"))

    def encode(self, plane: Plane, rows: torch.Tensor, planes: Planes) -> Rows:
        """Rounded to the type."""
        return {"data": rows.to(self.dtype)}

    def decode(self, plane: Plane, parts: Rows, planes: Planes) -> torch.Tensor:
        """As float32."""
        return parts["data"].float()

    def kernel_parts(self, plane: Plane, planes: Planes) -> tuple[torch.Tensor, ...]:
        """Elements alone; the kernels find their type."""
        return (planes.parts[f"{plane}_data"],)


CODECS = dict.fromkeys(DTYPES, Plain)
