"""offload: K, V and raw keys in host memory that the device reads in place, pooled keys on the device.

On CUDA each layer's host planes are one registered slab; where the CPU is the device they are one file-backed mapping.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from math import prod

import torch

from realkernels.backend import PlaneName, Tier
from realkernels.file_slab import file_slab
from realkernels.host_slab import HostSlab, host_slab
from realkernels.layouts.layout import Place, Planes, PlaneSpec

ON_HOST: tuple[PlaneName, ...] = ("keys", "values", "raw_keys")
"""In the order in which they lie in a layer's slab."""


class Offload:
    """K, V and raw keys on the host."""

    name = "offload"
    tier: Tier = "host"

    @contextmanager
    def planes(self, spec: PlaneSpec, place: Place) -> Iterator[Planes]:
        """One slab a layer: K, then V, then raw keys, without gaps."""
        planes = Planes(
            tiers={"keys": "host", "values": "host", "raw_keys": "host", "pooled_keys": "vram"},
            host={name: [] for name in ON_HOST},
        )
        with ExitStack() as slabs:
            try:
                for _ in range(spec.layers):
                    _add_layer(planes, slabs.enter_context(_slab(spec.layer_bytes(*ON_HOST), place)), spec, place)
                yield planes
            finally:
                planes.clear()
                if place.device.type == "cuda":
                    torch.cuda.empty_cache()


def _slab(nbytes: int, place: Place) -> AbstractContextManager[HostSlab]:
    if place.device.type == "cuda":
        return host_slab(nbytes, device=place.device, huge_pages=place.huge_pages)
    return file_slab(nbytes, folder=place.folder)


def _add_layer(planes: Planes, slab: HostSlab, spec: PlaneSpec, place: Place) -> None:
    _carve(planes.by_name, slab.device, spec)
    _carve(planes.host, slab.host, spec)
    pooled = torch.empty(spec.size("pooled_keys"), dtype=spec.dtype, device=place.device)
    planes.by_name["pooled_keys"].append(pooled)


def _carve(into: dict[PlaneName, list[torch.Tensor]], slab: torch.Tensor, spec: PlaneSpec) -> None:
    at = 0
    for name in ON_HOST:
        count = prod(spec.size(name)) * spec.dtype.itemsize
        into[name].append(slab[at : at + count].view(spec.dtype).view(spec.size(name)))
        at += count


LAYOUT = Offload()
