"""What a codec of the KV cache offers: where bytes lie, tokens quantised into slots and dequantised, rotations.

A kernel works on the stored basis: `rotate_query(q)` times stored K is q times K, and `rotate_output` brings a sum over
stored V back to the model's basis. Where nothing is rotated both return what they are given.

`append` and `dequantise` are the reference in torch. They work under capture in a CUDA graph with `checked=False` and
slots on the device: no value is read back and no shape depends on data. All sums are taken by halves, so that a token's
bytes do not depend on what is written with it. `kernels_of`, `decode_form` and `interleaved` have the Triton functions.

Every view of a cache is indexed [page, head, token, ...] whatever the bytes' order is; order and arrangement show in
strides only.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import ClassVar, Literal, TypeAlias

import torch

from realkernels.codecs.on_device import InterleavedKernels, RowKernels
from realkernels.kernels.decode_form import DecodeForm

Arrangement = Literal["inline", "aligned"]
"""inline: a token's codes and scales side by side, as published; aligned: each in a plane of its own."""

Plane = Literal["key", "value"]
PLANES: tuple[Plane, Plane] = ("key", "value")

ALIGNMENT = 16
"""Bytes that a row of codes begins on in the aligned arrangement: the widest load of a GPU thread."""

Rows = dict[str, torch.Tensor]
"""By the name of a part: [n, kv_heads, ...] of its type."""

Slots: TypeAlias = Sequence[int] | torch.Tensor
"""Integers below pages x page_tokens, in any order; on a device only as a tensor."""


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
class PartLayout:
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

    def split(self) -> "tuple[PartLayout, ...]":
        """The same parts, each in a tensor of its own in which a head's tokens follow one another."""
        return tuple(PartLayout(part.name, (part,), self.inner, heads_first=True) for part in self.parts)

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


@dataclass(frozen=True, kw_only=True)
class Codec(ABC):
    """One way to keep K and V, in one of its arrangements."""

    name: str
    arrangement: Arrangement
    arrangements: ClassVar[tuple[Arrangement, ...]]
    """The published one first."""
    decode_form: ClassVar[DecodeForm | None] = None
    """How the decode attention kernels read it; None where none does."""

    def __post_init__(self) -> None:
        if self.arrangement not in self.arrangements:
            raise ValueError(f"{self.name} is kept {' or '.join(self.arrangements)}, not {self.arrangement}")

    @property
    def tile_tokens(self) -> int:
        """Tokens that are quantised together."""
        return 1

    @abstractmethod
    def check(self, head_dim: int) -> None:
        """ValueError for head sizes that do not fit its groups, codes or rotation."""

    @abstractmethod
    def token_bytes(self, kv_heads: int, head_dim: int) -> int:
        """Bytes of K and V of one token in one layer, scales included, the sidecar apart."""

    @abstractmethod
    def allocate(self, pages: int, page_tokens: int, kv_heads: int, head_dim: int, device: torch.device) -> Planes:
        """Planes of zeros; ValueError for sizes that do not fit."""

    @abstractmethod
    def append(
        self, planes: Planes, slots: Slots, keys: torch.Tensor, values: torch.Tensor, *, checked: bool = True
    ) -> None:
        """Quantise rows [n, kv_heads, head_dim], n >= 1, into slots.

        ValueError, with nothing written, for what does not fit. `checked=False` vouches for slots on the device: in
        range, each once.
        """

    @abstractmethod
    def dequantise(self, planes: Planes, slots: Slots, *, checked: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [n, kv_heads, head_dim] float32 in the stored basis, as a kernel sees them."""

    def restore(
        self, planes: Planes, slots: Slots, dtype: torch.dtype = torch.float32, *, checked: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same in the model's basis; slots that were never written are undefined."""
        keys, values = self.dequantise(planes, slots, checked=checked)
        return self.rotate_back_keys(keys).to(dtype), self.rotate_output(values).to(dtype)

    def views(self, planes: Planes) -> Rows:
        """Every typed view that a kernel reads, with its strides; those of the sidecar included."""
        return {**planes.parts, **planes.sidecar}

    def rotate_query(self, query: torch.Tensor) -> torch.Tensor:
        """[..., head_dim] such that its product with stored K is the query's with K; its own type."""
        return query

    def rotate_output(self, output: torch.Tensor) -> torch.Tensor:
        """[..., head_dim] of stored V brought back to the model's basis; its own type."""
        return output

    def rotate_back_keys(self, keys: torch.Tensor) -> torch.Tensor:
        """[..., head_dim] of stored K brought back to the model's basis; its own type."""
        return self.rotate_output(keys)

    def warm(self, head_dim: int, device: torch.device) -> None:  # noqa: B027 - most have none
        """Put constants on the device, which a graph cannot do while it is captured."""


@dataclass(frozen=True, kw_only=True)
class RowCodec(Codec):
    """Quantises each token on its own: `published` says where parts lie, `encode` what they hold.

    The parts of K are called key_<name>, those of V value_<name>; codes are <plane>_data.
    """

    group: ClassVar[int] = 0
    """Elements of a head that are quantised together; 0: all of them."""
    kernels: ClassVar[RowKernels]
    interleaved: ClassVar[InterleavedKernels | None] = None
    """How a gather reads its interleaved blocks; None where none does."""

    @abstractmethod
    def published(self, head_dim: int) -> tuple[PartLayout, ...]:
        """Where the parts lie as published."""

    @abstractmethod
    def encode(self, plane: Plane, rows: torch.Tensor, planes: Planes) -> Rows:
        """The parts, without the plane's name, of rows [n, kv_heads, head_dim] float32."""

    @abstractmethod
    def decode(self, plane: Plane, parts: Rows, planes: Planes) -> torch.Tensor:
        """Rows [n, kv_heads, head_dim] float32 of such parts, in the stored basis."""

    def kernels_of(self, plane: Plane) -> RowKernels:
        """`encode` and `decode` as Triton functions."""
        return self.kernels

    def kernel_parts(self, plane: Plane, planes: Planes) -> tuple[torch.Tensor, ...]:
        """What they work on: views of codes and scales, in the order in which they take them, then tables."""
        return planes.parts[f"{plane}_data"], planes.parts[f"{plane}_scale"]

    def layouts(self, head_dim: int) -> tuple[PartLayout, ...]:
        """Where the parts lie in this arrangement; ValueError where aligned rows of codes would not be."""
        self.check(head_dim)
        published = self.published(head_dim)
        if self.arrangement == self.arrangements[0]:
            return published
        split = tuple(part for layout in published for part in layout.split())
        for layout in split:
            if layout.name.endswith("_data") and layout.token_head_bytes % ALIGNMENT:
                raise ValueError(
                    f"{self.name} aligned needs rows of codes in multiples of {ALIGNMENT} B: those of {layout.name} "
                    f"have {layout.token_head_bytes} B at head size {head_dim}; take inline"
                )
        return split

    def token_bytes(self, kv_heads: int, head_dim: int) -> int:
        """Bytes of K and V of one token in one layer, scales included, the sidecar apart."""
        return kv_heads * sum(layout.token_head_bytes for layout in self.layouts(head_dim))

    def sidecar(self, device: torch.device) -> Rows:
        """What lies beside the planes."""
        return {}

    def allocate(self, pages: int, page_tokens: int, kv_heads: int, head_dim: int, device: torch.device) -> Planes:
        """Planes of zeros; ValueError for sizes that do not fit."""
        check_sizes(pages=pages, page_tokens=page_tokens, kv_heads=kv_heads, head_dim=head_dim)
        layouts = self.layouts(head_dim)
        tensors = {layout.name: layout.tensor(pages, page_tokens, kv_heads, device) for layout in layouts}
        parts = {name: view for layout in layouts for name, view in layout.views(tensors[layout.name]).items()}
        planes = Planes(
            pages=pages, page_tokens=page_tokens, kv_heads=kv_heads, head_dim=head_dim,
            tensors=tensors, parts=parts, sidecar=self.sidecar(device),
        )  # fmt: skip
        self.warm(head_dim, planes.device)
        return planes

    def append(
        self, planes: Planes, slots: Slots, keys: torch.Tensor, values: torch.Tensor, *, checked: bool = True
    ) -> None:
        """Quantise rows [n, kv_heads, head_dim], n >= 1, into slots; ValueError, with nothing written, for others."""
        index = slot_tensor(planes, slots, checked=checked, distinct=True)
        check_rows(planes, index.numel(), keys, values)
        page, offset = index // planes.page_tokens, index % planes.page_tokens
        for plane, rows in zip(PLANES, (keys, values), strict=True):
            for name, part in self.encode(plane, rows.detach().float(), planes).items():
                planes.parts[f"{plane}_{name}"].transpose(1, 2)[page, offset] = part

    def dequantise(self, planes: Planes, slots: Slots, *, checked: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [n, kv_heads, head_dim] float32 in the stored basis, as a kernel sees them."""
        index = slot_tensor(planes, slots, checked=checked)
        page, offset = index // planes.page_tokens, index % planes.page_tokens
        rows = {name: view.transpose(1, 2)[page, offset] for name, view in planes.parts.items()}
        keys, values = (
            self.decode(plane, {name.removeprefix(f"{plane}_"): part for name, part in rows.items()}, planes)
            for plane in PLANES
        )
        return keys, values


def check_sizes(**sizes: int) -> None:
    """ValueError for a size below 1."""
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} is {value}, which is below 1")


def check_multiple(name: str, head_dim: int, of: int) -> None:
    """ValueError for a head size that is no multiple."""
    if head_dim < 1 or head_dim % of:
        raise ValueError(f"{name} needs head sizes that are multiples of {of}, not {head_dim}")


def check_power_of_two(name: str, head_dim: int, least: int) -> None:
    """ValueError for a head size that has no Hadamard matrix of Sylvester's."""
    if head_dim < least or head_dim & (head_dim - 1):
        raise ValueError(f"{name} rotates heads whose size is a power of two from {least}, not {head_dim}")


def slot_tensor(planes: Planes, slots: Slots, *, checked: bool, distinct: bool = False) -> torch.Tensor:
    """int64 [n] on the planes' device; ValueError for none, for slots out of range and, if `distinct`, repeated ones.

    `checked` reads slots that lie on a device back, which waits for it and cannot be captured in a graph; without it
    the caller vouches for them.
    """
    given = slots if isinstance(slots, torch.Tensor) else torch.tensor(slots, dtype=torch.int64)
    if given.dim() != 1 or given.numel() == 0:
        raise ValueError(f"slots are {tuple(given.shape)}: give one axis of at least one slot")
    if given.is_floating_point() or given.dtype == torch.bool:
        raise ValueError(f"slots are {given.dtype}: give integers")
    if checked:
        if given.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ValueError("slots cannot be checked while a graph is captured: give checked=False")
        _check_slots(given.cpu(), planes, distinct=distinct)
    return given.to(device=planes.device, dtype=torch.int64)


def _check_slots(slots: torch.Tensor, planes: Planes, *, distinct: bool) -> None:
    low, high = int(slots.min()), int(slots.max())
    if low < 0 or high >= planes.slots:
        wrong = low if low < 0 else high
        raise ValueError(f"slot {wrong} does not lie in {planes.pages} pages of {planes.page_tokens} tokens")
    if distinct and slots.unique().numel() < slots.numel():
        raise ValueError("a slot is written twice in one append")


def check_rows(planes: Planes, tokens: int, keys: torch.Tensor, values: torch.Tensor) -> None:
    """ValueError unless both are floating-point [tokens, kv_heads, head_dim] on the planes' device."""
    expected = (tokens, planes.kv_heads, planes.head_dim)
    for name, rows in (("keys", keys), ("values", values)):
        if tuple(rows.shape) != expected:
            raise ValueError(f"{name} are {tuple(rows.shape)}, {tokens} slots take {expected}")
        if not rows.is_floating_point():
            raise ValueError(f"{name} are {rows.dtype}: give floating-point rows")
        if rows.device != planes.device:
            raise ValueError(f"{name} lie on {rows.device}, the planes on {planes.device}")
