"""llama.cpp's q8_0 and q4_0 as a cache: groups of 32 elements of a head with a float16 scale.

| bytes of a group, inline | q8_0 | q4_0 |
|---|---|---|
| 0 .. 1 | scale, float16 | scale, float16 |
| 2 .. | 32 codes, two's complement | 16 bytes: element j in the low nibble of byte j, element j + 16 in the high one |
| a group | 34 B | 18 B |

inline: key_blocks and value_blocks uint8 [page, token, head, D / 32, 34 or 18]. aligned: codes and scales in planes of
their own, page, head, token, group; the same bytes. Source: llama.cpp `ggml-common.h` (block sizes 2 + 32 and 2 + 16
B).

q8_0: scale = absmax / 127, code = round(x / scale), x = code x scale. q4_0: scale = m / -8 where m is the first element
of the largest magnitude with its sign; code = floor(x / scale + 8.5) in 0 .. 15, x = (code - 8) x scale: what lies as
far as m on the other side loses up to a whole scale. Codes are found with the scale as it is stored, in float16.

A group that holds NaN or infinity, or whose scale exceeds 65,504, has the scale NaN: those 32 elements of that token
only.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from realkernels.formats.arithmetic import half_scale, over
from realkernels.formats.format import RowFormat, Rows, check_multiple
from realkernels.formats.planes import Arrangement, Part, Planes, Record

GROUP = 32


@dataclass(frozen=True, kw_only=True)
class Gguf(RowFormat):
    """A scale and codes for each 32 elements."""

    arrangements: ClassVar[tuple[Arrangement, ...]] = ("inline", "aligned")

    @property
    def code_bytes(self) -> int:
        """Of the codes of a group."""
        return GROUP if self.name == "q8_0" else GROUP // 2

    def check(self, head_dim: int) -> None:
        """Whole groups."""
        check_multiple(self.name, head_dim, GROUP)

    def published(self, head_dim: int) -> tuple[Record, ...]:
        """A tensor of blocks for K and one for V; page, token, head, group."""
        return tuple(
            Record(
                f"{plane}_blocks",
                (
                    Part(f"{plane}_scale", torch.float16),
                    Part(f"{plane}_data", torch.uint8, (self.code_bytes,)),
                ),
                (head_dim // GROUP,),
            )
            for plane in ("key", "value")
        )

    def encode(self, planes: Planes, keys: torch.Tensor, values: torch.Tensor) -> Rows:  # noqa: ARG002
        """Both planes alike."""
        quantise = _quantise_8 if self.name == "q8_0" else _quantise_4
        key_data, key_scale = quantise(keys.unflatten(-1, (-1, GROUP)))
        value_data, value_scale = quantise(values.unflatten(-1, (-1, GROUP)))
        return {"key_data": key_data, "key_scale": key_scale, "value_data": value_data, "value_scale": value_scale}

    def decode(self, planes: Planes, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ARG002
        """Both planes alike."""
        dequantise = _dequantise_8 if self.name == "q8_0" else _dequantise_4
        keys = dequantise(rows["key_data"], rows["key_scale"].float()[..., None])
        return keys, dequantise(rows["value_data"], rows["value_scale"].float()[..., None])


def _quantise_8(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 [..., 32] and float16 [...] of float32 [..., 32]."""
    scale = half_scale(over(groups.abs().amax(dim=-1, keepdim=True), 127.0))
    codes = _codes(groups, scale).round().clamp(-127, 127)
    return codes.to(torch.int8).view(torch.uint8), scale.squeeze(-1)


def _quantise_4(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 [..., 16] and float16 [...] of float32 [..., 32]."""
    largest = groups.gather(-1, groups.abs().argmax(dim=-1, keepdim=True))
    scale = half_scale(largest / -8)
    codes = (_codes(groups, scale) + 8.5).floor().clamp(0, 15).to(torch.uint8)
    return codes[..., : GROUP // 2] | codes[..., GROUP // 2 :] << 4, scale.squeeze(-1)


def _codes(groups: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Groups over their scales, 0 where that is no number."""
    return (groups / scale.float()).nan_to_num(0.0, posinf=0.0, neginf=0.0)


def _dequantise_8(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float32 [n, heads, D]."""
    return (codes.contiguous().view(torch.int8).float() * scale).flatten(-2)


def _dequantise_4(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float32 [n, heads, D]."""
    elements = torch.cat((codes & 15, codes >> 4), dim=-1)
    return ((elements.float() - 8) * scale).flatten(-2)


FORMATS = {"q8_0": Gguf, "q4_0": Gguf}
