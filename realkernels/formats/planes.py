"""The tensors of one layer's K and V in some format, and the typed views by which codes and kernels reach them.

Every view is indexed [page, head, token, ...] whatever the bytes' order is; order and arrangement show in strides only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal

import torch

Arrangement = Literal["inline", "aligned"]
"""inline: a token's codes and scales side by side, as published; aligned: each in a plane of its own."""

ALIGNMENT = 16
"""Bytes that a row of codes begins on in the aligned arrangement: the widest load of a GPU thread."""


@dataclass(frozen=True)
class Part:
    """Codes or scales that every token and head has: `shape` elements of `dtype`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of one."""
        return int(self.dtype.itemsize) * prod(self.shape)


@dataclass(frozen=True)
class Record:
    """Parts side by side in one tensor, once for each page, head and token (and for each of `inner` groups)."""

    name: str
    parts: tuple[Part, ...]
    inner: tuple[int, ...] = ()
    heads_first: bool = False
    """Page, head, token in memory; otherwise page, token, head."""
    pad_to: int = 1

    @property
    def stride(self) -> int:
        """Bytes from one to the next."""
        return -(-sum(part.nbytes for part in self.parts) // self.pad_to) * self.pad_to

    @property
    def token_head_bytes(self) -> int:
        """Bytes of one token of one head."""
        return self.stride * prod(self.inner)

    def split(self) -> "tuple[Record, ...]":
        """The same parts, each in a tensor of its own in which a head's tokens follow one another."""
        return tuple(Record(part.name, (part,), self.inner, heads_first=True) for part in self.parts)

    def tensor(self, pages: int, page_tokens: int, kv_heads: int, device: torch.device) -> torch.Tensor:
        """Zeros: of the part's own type where there is one part, bytes otherwise."""
        order = (kv_heads, page_tokens) if self.heads_first else (page_tokens, kv_heads)
        tail, dtype = (
            ((self.stride,), torch.uint8) if len(self.parts) > 1 else (self.parts[0].shape, self.parts[0].dtype)
        )
        return torch.zeros(pages, *order, *self.inner, *tail, dtype=dtype, device=device)

    def views(self, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Each part as [pages, kv_heads, page_tokens, *inner, *shape] of its type, without a copy."""
        named = {self.parts[0].name: tensor} if len(self.parts) == 1 else cut(tensor, self.parts)
        return named if self.heads_first else {name: view.transpose(1, 2) for name, view in named.items()}


def cut(tensor: torch.Tensor, parts: Sequence[Part]) -> dict[str, torch.Tensor]:
    """Bytes [..., stride] as one view a part, [..., *shape] of its type, in the order in which they lie."""
    views, at = {}, 0
    for part in parts:
        view = tensor[..., at : at + part.nbytes].view(part.dtype)
        views[part.name] = view.unflatten(-1, part.shape) if part.shape else view.squeeze(-1)
        at += part.nbytes
    return views


@dataclass(frozen=True, kw_only=True, eq=False)
class Planes:
    """One layer's K and V for `pages` pages of `page_tokens` tokens; slot = page x page_tokens + offset."""

    pages: int
    page_tokens: int
    kv_heads: int
    head_dim: int
    tensors: dict[str, torch.Tensor]
    """What a token's bytes count: their nbytes sum up to pages x page_tokens x token_bytes."""
    parts: dict[str, torch.Tensor]
    """Typed views of `tensors`."""
    sidecar: dict[str, torch.Tensor] = field(default_factory=dict)
    """What lies beside: a scale per layer, tokens that are not quantised yet, and the bookkeeping of both."""

    @property
    def slots(self) -> int:
        """Tokens that have a place."""
        return self.pages * self.page_tokens

    @property
    def device(self) -> torch.device:
        """Where all of it lies."""
        return next(iter(self.tensors.values())).device

    @property
    def nbytes(self) -> int:
        """Bytes of the planes, the sidecar apart."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def sidecar_bytes(self) -> int:
        """Bytes of the sidecar."""
        return sum(tensor.nbytes for tensor in self.sidecar.values())
