"""What a placement must offer: the planes of every layer, each in the memory that it belongs to."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from math import prod
from typing import Protocol

import torch

from realkernels.backend import PlaneName, Tier
from realkernels.shape import QsaShape

PLANES: tuple[PlaneName, ...] = ("keys", "values", "raw_keys", "pooled_keys")


@dataclass(frozen=True, kw_only=True)
class PlaneSpec:
    """Planes of `layers` layers for one sequence of up to `tokens` tokens, all of one `dtype`."""

    shape: QsaShape
    layers: int
    tokens: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise ValueError(f"layers is {self.layers}, which is below 1")
        if self.tokens < self.shape.ratio:
            raise ValueError(f"tokens is {self.tokens}, below one block of {self.shape.ratio}")

    def size(self, plane: PlaneName) -> tuple[int, ...]:
        """Shape of one layer's plane."""
        if plane == "raw_keys":
            return (self.tokens, self.shape.index_dim)
        if plane == "pooled_keys":
            return (self.shape.blocks(self.tokens), self.shape.index_dim)
        return (self.tokens, self.shape.kv_heads, self.shape.head_dim)

    def layer_bytes(self, *planes: PlaneName) -> int:
        """Bytes of these planes in one layer, by arithmetic."""
        return sum(prod(self.size(plane)) for plane in planes) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Place:
    """What a placement is given to allocate from."""

    device: torch.device
    folder: str | None = None
    """Where a backend without a device keeps the files of its offload tier; None: the system's temporary folder."""
    huge_pages: bool = True


@dataclass(frozen=True, kw_only=True)
class Planes:
    """Tensors of every plane, one a layer, as the device addresses them."""

    by_name: dict[PlaneName, list[torch.Tensor]] = field(default_factory=lambda: {name: [] for name in PLANES})
    tiers: Mapping[PlaneName, Tier]
    host: dict[PlaneName, list[torch.Tensor]] = field(default_factory=dict)
    """The same bytes as tensors of the host, for planes that lie there."""

    def clear(self) -> None:
        """Forget every tensor, so that memory can be given back although somebody still holds this object."""
        for tensors in (*self.by_name.values(), *self.host.values()):
            tensors.clear()

    def bytes_by_tier(self) -> dict[Tier, int]:
        """Bytes of the tensors themselves, for both tiers."""
        total: dict[Tier, int] = {"vram": 0, "host": 0}
        for name, tensors in self.by_name.items():
            total[self.tiers[name]] += sum(tensor.nbytes for tensor in tensors)
        return total


class PlaneLayout(Protocol):
    """One placement."""

    name: str
    tier: Tier
    """Where K and V lie."""

    def planes(self, spec: PlaneSpec, place: Place) -> AbstractContextManager[Planes]:
        """Planes with undefined contents; all memory is given back on leaving, on every path.

        Raises torch.OutOfMemoryError or host_slab.RegistrationError, with nothing left allocated or pinned.
        """
        ...
