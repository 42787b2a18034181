"""exllamav3's quantised cache: K and V in 2 to 8 bits each, in rotated groups of 32 with a float16 scale.

| tensor | type and shape | bytes of a token |
|---|---|---|
| qk | int32 [page, token, H D / 32 x k bits] | H D k / 8 |
| sk | float16 [page, token, H D / 32] | H D / 16 |
| qv | int32 [page, token, H D / 32 x v bits] | H D v / 8 |
| sv | float16 [page, token, H D / 32] | H D / 16 |

Groups of 32 along the flattened head and dim axes; each is rotated by Sylvester's H32 / sqrt(32), scaled by its largest
magnitude in float16, and quantised linearly. The b words of a group are one little-endian stream: code i at bits
[b i, b (i + 1)) of 32 b. Source: exllamav3's `exllamav3_ext/cache/q_cache_kernels.cuh`, from a description of it.

It leaves the levels open: here they are the middles of 2^b equal cells of [-scale, scale], which has the
least largest error, scale / 2^b: code = floor((x / scale + 1) 2^b / 2), x = scale x ((2 code + 1) / 2^b - 1).

A group that holds NaN or infinity, or exceeds 65,504 when rotated, has the scale NaN: those 32 elements of that token
only.
"""

from dataclasses import dataclass
from math import sqrt
from typing import ClassVar

import torch

from realkernels.formats.arithmetic import hadamard, half_scale, pack, unpack
from realkernels.formats.format import RowFormat, Rows, check_multiple
from realkernels.formats.planes import Arrangement, Part, Planes, Record

GROUP = 32
BITS = {f"exl3_k{key}v{value}": (key, value) for key in range(2, 9) for value in range(2, 9)}


@dataclass(frozen=True, kw_only=True)
class Exl3(RowFormat):
    """Four planes: words and scales of K and of V."""

    arrangements: ClassVar[tuple[Arrangement, ...]] = ("aligned",)

    def check(self, head_dim: int) -> None:
        """Groups lie within heads, so that a query can be rotated."""
        check_multiple(self.name, head_dim, GROUP)

    def published(self, head_dim: int) -> tuple[Record, ...]:
        """Words as bytes: the same memory."""
        key_bits, value_bits = BITS[self.name]
        groups = (head_dim // GROUP,)
        return (
            Record("qk", (Part("key_data", torch.uint8, (4 * key_bits,)),), groups),
            Record("sk", (Part("key_scale", torch.float16),), groups),
            Record("qv", (Part("value_data", torch.uint8, (4 * value_bits,)),), groups),
            Record("sv", (Part("value_scale", torch.float16),), groups),
        )

    def allocate(self, pages: int, page_tokens: int, kv_heads: int, head_dim: int, device: torch.device) -> Planes:
        """Planes of zeros, the tensors in their published shapes; ValueError for sizes that do not fit."""
        planes = super().allocate(pages, page_tokens, kv_heads, head_dim, device)
        for name, tensor in planes.tensors.items():
            planes.tensors[name] = tensor.flatten(2) if name in {"sk", "sv"} else tensor.flatten(2).view(torch.int32)
        return planes

    def views(self, planes: Planes) -> Rows:
        """Beside the bytes key_words and value_words int32 [page, head, token, group, bits], the same memory."""
        words = {f"{plane}_words": planes.parts[f"{plane}_data"].view(torch.int32) for plane in ("key", "value")}
        return {**super().views(planes), **words}

    def encode(self, planes: Planes, keys: torch.Tensor, values: torch.Tensor) -> Rows:  # noqa: ARG002
        """Rotate, scale, quantise, pack."""
        key_bits, value_bits = BITS[self.name]
        key_data, key_scale = _quantise(keys, key_bits)
        value_data, value_scale = _quantise(values, value_bits)
        return {"key_data": key_data, "key_scale": key_scale, "value_data": value_data, "value_scale": value_scale}

    def decode(self, planes: Planes, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ARG002
        """Groups put together, rotated as they are."""
        key_bits, value_bits = BITS[self.name]
        keys = _dequantise(rows["key_data"], rows["key_scale"], key_bits)
        return keys, _dequantise(rows["value_data"], rows["value_scale"], value_bits)

    def rotate_query(self, query: torch.Tensor) -> torch.Tensor:
        """H32 / sqrt(32) over each 32 elements, its own inverse."""
        groups = query.float().unflatten(-1, (-1, GROUP))
        return (hadamard(groups) * (1 / sqrt(GROUP))).flatten(-2).to(query.dtype)

    def rotate_output(self, output: torch.Tensor) -> torch.Tensor:
        """The same once more."""
        return self.rotate_query(output)

    def rotate_back_keys(self, keys: torch.Tensor) -> torch.Tensor:
        """The same once more."""
        return self.rotate_query(keys)


def _quantise(rows: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 [n, heads, groups, 4 bits] and float16 [n, heads, groups] of float32 [n, heads, D]."""
    x = hadamard(rows.unflatten(-1, (-1, GROUP))) * (1 / sqrt(GROUP))
    scale = half_scale(x.abs().amax(dim=-1, keepdim=True))
    cells = ((x / scale.float() + 1) * 2 ** (bits - 1)).nan_to_num(0.0).floor()
    return pack(cells.clamp(0, 2**bits - 1), bits), scale.squeeze(-1)


def _dequantise(data: torch.Tensor, scale: torch.Tensor, bits: int) -> torch.Tensor:
    """float32 [n, heads, D], rotated."""
    levels = (2 * unpack(data, bits) + 1).float() / 2**bits - 1
    return (levels * scale.float()[..., None]).flatten(-2)


FORMATS = dict.fromkeys(BITS, Exl3)
