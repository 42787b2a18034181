"""What a format offers: bytes of a token, planes, tokens quantised into slots and read back, rotations of q and output.

A kernel works on the stored basis: `rotate_query(q)` times stored K is q times K, and `rotate_output` brings a sum over
stored V back to the model's basis. Where nothing is rotated both return what they are given.

append and read work under capture in a CUDA graph with `checked=False` and slots on the device: no value is read back
and no shape depends on data. All sums are folded by halves, so that a token's bytes do not depend on what is written
with it.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from realkernels.formats.planes import ALIGNMENT, Arrangement, Planes, Record
from realkernels.formats.slots import Slots, check_rows, slot_tensor

Rows = dict[str, torch.Tensor]
"""By the name of a view: [n, kv_heads, ...] of its type."""


@dataclass(frozen=True, kw_only=True)
class Format(ABC):
    """One way to keep K and V, in one of its arrangements."""

    name: str
    arrangement: Arrangement
    arrangements: ClassVar[tuple[Arrangement, ...]]
    """The published one first."""

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
    def read(self, planes: Planes, slots: Slots, *, checked: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [n, kv_heads, head_dim] float32 in the stored basis, as a kernel sees them."""

    def unpack(
        self, planes: Planes, slots: Slots, dtype: torch.dtype = torch.float32, *, checked: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [n, kv_heads, head_dim] in the model's basis; slots that were never written are undefined."""
        keys, values = self.read(planes, slots, checked=checked)
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
        return keys

    def warm(self, head_dim: int, device: torch.device) -> None:  # noqa: B027 - most have none
        """Put constants on the device, which a graph cannot do while it is captured."""


@dataclass(frozen=True, kw_only=True)
class RowFormat(Format):
    """A format that quantises each token on its own: `records` say where parts lie, `encode` what they hold."""

    @abstractmethod
    def published(self, head_dim: int) -> tuple[Record, ...]:
        """Where the parts lie as published."""

    @abstractmethod
    def encode(self, planes: Planes, keys: torch.Tensor, values: torch.Tensor) -> Rows:
        """Rows [n, kv_heads, head_dim] float32 as parts."""

    @abstractmethod
    def decode(self, planes: Planes, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """Parts as rows [n, kv_heads, head_dim] float32 in the stored basis."""

    def records(self, head_dim: int) -> tuple[Record, ...]:
        """Where the parts lie in this arrangement; ValueError where aligned rows of codes would not be."""
        self.check(head_dim)
        published = self.published(head_dim)
        if self.arrangement == self.arrangements[0]:
            return published
        split = tuple(part for record in published for part in record.split())
        for record in split:
            if record.name.endswith("_data") and record.token_head_bytes % ALIGNMENT:
                raise ValueError(
                    f"{self.name} aligned needs rows of codes in multiples of {ALIGNMENT} B: those of {record.name} "
                    f"have {record.token_head_bytes} B at head size {head_dim}; take inline"
                )
        return split

    def token_bytes(self, kv_heads: int, head_dim: int) -> int:
        """Bytes of K and V of one token in one layer, scales included, the sidecar apart."""
        return kv_heads * sum(record.token_head_bytes for record in self.records(head_dim))

    def sidecar(self, device: torch.device) -> Rows:  # noqa: ARG002 - most have none
        """What lies beside the planes."""
        return {}

    def allocate(self, pages: int, page_tokens: int, kv_heads: int, head_dim: int, device: torch.device) -> Planes:
        """Planes of zeros; ValueError for sizes that do not fit."""
        check_sizes(pages=pages, page_tokens=page_tokens, kv_heads=kv_heads, head_dim=head_dim)
        records = self.records(head_dim)
        tensors = {record.name: record.tensor(pages, page_tokens, kv_heads, device) for record in records}
        parts = {name: view for record in records for name, view in record.views(tensors[record.name]).items()}
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
        for name, rows in self.encode(planes, keys.detach().float(), values.detach().float()).items():
            planes.parts[name].transpose(1, 2)[page, offset] = rows

    def read(self, planes: Planes, slots: Slots, *, checked: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [n, kv_heads, head_dim] float32 in the stored basis, as a kernel sees them."""
        index = slot_tensor(planes, slots, checked=checked)
        page, offset = index // planes.page_tokens, index % planes.page_tokens
        rows = {name: view.transpose(1, 2)[page, offset] for name, view in planes.parts.items()}
        return self.decode(planes, rows)


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
