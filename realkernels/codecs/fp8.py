"""K and V in float8 e4m3: with one scale a layer and plane (fp8), or a float32 for each token and head.

| format | plane | bytes of a token and head | order |
|---|---|---|---|
| fp8 | key_data, value_data | D e4m3fn each | page, token, head |
| fp8 | key_scale, value_scale | float32 [1] a layer, in the sidecar | |
| fp8_per_token_head | as `per_token_head.py` says | 2 (D + 4) | page, head, token |

fp8: x = e4m3(code) x scale; the scales begin at 1 and are set once, before the first token. Saturating: what exceeds
448 scales, infinities included, becomes 448 scales; NaN stays NaN. Either stays within its element.

fp8_per_token_head: scale = max(absmax / 448, 1e-6); x = e4m3(code) x scale, ties to even: the largest element of a row
has the code 448. Source of both: vLLM 0.28.0, the latter's kernels `ops/triton_reshape_and_cache_flash.py` need SM 8.9.
"""

import torch

from realkernels.codecs import on_device as dev
from realkernels.codecs.arithmetic import from_e4m3, to_e4m3
from realkernels.codecs.codec import PLANES, Part, PartLayout, Plane, Planes, RowCodec, Rows, check_multiple
from realkernels.codecs.per_token_head import PerTokenHead, absmax_scale, largest_scale
from realkernels.jit import tl, triton
from realkernels.kernels.arithmetic import fp8_halves
from realkernels.kernels.decode_form import DecodeForm, plan_bytes
from realkernels.kernels.decode_scaled import ScaledCodec, attend_scaled


@triton.jit
def _encode(x, parts, place, there, keep, BITS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    codes = dev.e4m3_bits(tl.div_rn(x, tl.load(parts[1][0])))
    dev.store_codes(dev.pointer(parts[0], place)[:, None], codes, keep, ROWS, WIDTH, 8)


@triton.jit
def _dequantise(out, parts, WAYS: tl.constexpr, place, live, BITS: tl.constexpr, WIDTH: tl.constexpr):
    codes = dev.load_codes(parts, WAYS, 0, place, live, WIDTH)
    dev.store_row(out, dev.e4m3_numbers(codes) * tl.load(parts[1]), live, WIDTH)


@triton.jit
def _encode_rows(x, parts, place, there, keep, BITS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    scale = largest_scale(x, 448.0, ROWS)
    codes = dev.e4m3_bits(dev.number_or(tl.div_rn(x, scale[:, None]), 0.0))
    tl.store(dev.pointer(parts[1], place), scale, mask=there)
    dev.store_codes(dev.pointer(parts[0], place)[:, None], codes, keep, ROWS, WIDTH, 8)


@triton.jit
def _dequantise_rows(out, parts, WAYS: tl.constexpr, place, live, BITS: tl.constexpr, WIDTH: tl.constexpr):
    scale = dev.load_scale(parts, WAYS, 1, place, live)
    codes = dev.load_codes(parts, WAYS, 0, place, live, WIDTH)
    dev.store_row(out, dev.e4m3_numbers(codes) * scale, live, WIDTH)


@triton.jit
def _halves(w, ASM: tl.constexpr):
    return fp8_halves(w, ASM)


DECODE = DecodeForm(
    loop=attend_scaled, plan=plan_bytes, options={"codec": ScaledCodec(numbers=_halves, key_numbers=_halves)},
    least_capability=(8, 9),
)  # fmt: skip


class Fp8(RowCodec):
    """e4m3 by a scale of the layer's."""

    arrangements = ("aligned",)
    decode_form = DECODE
    kernels = dev.RowKernels(_encode, _dequantise)

    def check(self, head_dim: int) -> None:
        """Any head size fits."""
        check_multiple(self.name, head_dim, 1)

    def published(self, head_dim: int) -> tuple[PartLayout, ...]:
        """Two planes."""
        names = (f"{plane}_data" for plane in PLANES)
        return tuple(PartLayout(name, (Part(name, torch.uint8, (head_dim,)),)) for name in names)

    def sidecar(self, device: torch.device) -> Rows:
        """The two scales, 1."""
        return {f"{plane}_scale": torch.ones(1, device=device) for plane in PLANES}

    def set_scales(self, planes: Planes, *, key: float, value: float) -> None:
        """Before the first token: what is written already keeps its codes and would change its values."""
        for name, scale in (("key_scale", key), ("value_scale", value)):
            if not 0 < scale < float("inf"):
                raise ValueError(f"{name} is {scale}: give a positive, finite one")
            planes.sidecar[name].fill_(scale)

    def encode(self, plane: Plane, rows: torch.Tensor, planes: Planes) -> Rows:
        """Nearest codes, ties to even."""
        return {"data": to_e4m3(rows / planes.sidecar[f"{plane}_scale"])}

    def decode(self, plane: Plane, parts: Rows, planes: Planes) -> torch.Tensor:
        """Codes times the layer's scale."""
        return from_e4m3(parts["data"]) * planes.sidecar[f"{plane}_scale"]

    def kernel_parts(self, plane: Plane, planes: Planes) -> tuple[torch.Tensor, ...]:
        """The scale is a table of one number."""
        return planes.parts[f"{plane}_data"], planes.sidecar[f"{plane}_scale"]


class Fp8PerTokenHead(PerTokenHead):
    """The largest element of a row has the code 448."""

    bits = 8
    decode_form = DECODE
    kernels = dev.RowKernels(_encode_rows, _dequantise_rows)

    def check(self, head_dim: int) -> None:
        """Inline scales lie on multiples of 4 B."""
        check_multiple(self.name, head_dim, 4)

    def encode(self, plane: Plane, rows: torch.Tensor, planes: Planes) -> Rows:
        """Nearest codes, ties to even."""
        scale = absmax_scale(rows, 448.0)
        return {"data": to_e4m3((rows / scale).nan_to_num(0.0)), "scale": scale.squeeze(-1)}

    def decode(self, plane: Plane, parts: Rows, planes: Planes) -> torch.Tensor:
        """Codes times the row's scale."""
        return from_e4m3(parts["data"]) * parts["scale"][..., None]


CODECS = {"fp8": Fp8, "fp8_per_token_head": Fp8PerTokenHead}
