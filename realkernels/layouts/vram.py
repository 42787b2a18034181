"""vram: every plane in the device's own memory; ordinary memory where the CPU is the device."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from realkernels.backend import Tier
from realkernels.layouts.layout import PLANES, Place, Planes, PlaneSpec


class Vram:
    """K, V, raw and pooled keys on the device."""

    name = "vram"
    tier: Tier = "vram"

    @contextmanager
    def planes(self, spec: PlaneSpec, place: Place) -> Iterator[Planes]:
        """One tensor a layer and plane."""
        planes = Planes(tiers=dict.fromkeys(PLANES, self.tier))
        try:
            for _ in range(spec.layers):
                for name in PLANES:
                    tensor = torch.empty(spec.size(name), dtype=spec.dtype, device=place.device)
                    planes.by_name[name].append(tensor)
            del tensor
            yield planes
        finally:
            planes.clear()
            if place.device.type == "cuda":
                torch.cuda.empty_cache()


LAYOUT = Vram()
