"""The planes of one sequence in whichever memory a layout put them, and the two ways in which they are written."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from realkernels.backend import PlaneName, Tier
from realkernels.layouts import Place, PlaneLayout, Planes, PlaneSpec
from realkernels.pooling import touched_blocks

Pool = Callable[[torch.Tensor, torch.Tensor, range, int], None]

FILL_ROWS = 65536
"""Rows filled at once, so that filling needs no second plane."""


class PlaneCache:
    """`backend.QsaCache` over the planes of a layout."""

    def __init__(self, spec: PlaneSpec, *, tier: Tier, device: torch.device, planes: Planes, pool: Pool) -> None:
        self.shape, self.layers, self.tokens, self.dtype = spec.shape, spec.layers, spec.tokens, spec.dtype
        self.tier, self.device = tier, device
        self._planes, self._pool = planes, pool

    @property
    def keys(self) -> Sequence[torch.Tensor]:
        """[tokens, kv_heads, head_dim] a layer."""
        return self._planes.by_name["keys"]

    @property
    def values(self) -> Sequence[torch.Tensor]:
        """[tokens, kv_heads, head_dim] a layer."""
        return self._planes.by_name["values"]

    @property
    def raw_keys(self) -> Sequence[torch.Tensor]:
        """[tokens, index_dim] a layer."""
        return self._planes.by_name["raw_keys"]

    @property
    def pooled_keys(self) -> Sequence[torch.Tensor]:
        """[tokens // ratio, index_dim] a layer."""
        return self._planes.by_name["pooled_keys"]

    def plane(self, name: PlaneName, layer: int) -> torch.Tensor:
        """A plane as copies want it: as a tensor of the host where it lies there, of the device otherwise."""
        return self._planes.host.get(name, self._planes.by_name[name])[layer]

    def bytes_by_tier(self) -> dict[Tier, int]:
        """Bytes of all planes, summed over the tensors themselves, for both tiers."""
        return self._planes.bytes_by_tier()

    def fill_random(self, seed: int) -> None:
        """Standard normal values in K, V and raw keys; pooled keys are pooled from the raw ones."""
        for layer in range(self.layers):
            for index, planes in enumerate((self.keys, self.values, self.raw_keys)):
                plane = planes[layer]
                source = torch.Generator(plane.device).manual_seed((seed * 1009 + layer) * 3 + index)
                draw = torch.float32 if plane.device.type == "cpu" else plane.dtype
                for part in plane.split(FILL_ROWS):
                    part.copy_(torch.randn(part.shape, dtype=draw, device=plane.device, generator=source))
            blocks = range(self.shape.blocks(self.tokens))
            self._pool(self.raw_keys[layer], self.pooled_keys[layer], blocks, self.shape.ratio)

    def append(self, layer: int, past: int, keys: torch.Tensor, values: torch.Tensor, raw_keys: torch.Tensor) -> None:
        """Write rows at `past` and rebuild the pooled keys of every block that they touch and complete.

        keys and values [rows, kv_heads, head_dim], raw_keys [rows, index_dim], rows >= 1, in the planes' dtype.
        ValueError for other shapes or dtypes and for rows beyond the planes; nothing is written then.
        """
        rows = keys.shape[0]
        if past < 0 or rows < 1 or past + rows > self.tokens:
            raise ValueError(f"rows {past} to {past + rows - 1} do not lie in planes of {self.tokens} tokens")
        written = [(self.keys, keys), (self.values, values), (self.raw_keys, raw_keys)]
        for planes, new in written:
            expected = (rows, *planes[layer].shape[1:])
            if tuple(new.shape) != expected or new.dtype != planes[layer].dtype:
                raise ValueError(
                    f"rows are {new.dtype} {tuple(new.shape)}, the plane takes {planes[layer].dtype} {expected}"
                )
        for planes, new in written:
            planes[layer][past : past + rows].copy_(new)
        blocks = touched_blocks(past, rows, self.shape.ratio)
        self._pool(self.raw_keys[layer], self.pooled_keys[layer], blocks, self.shape.ratio)


@contextmanager
def plane_cache(layout: PlaneLayout, spec: PlaneSpec, place: Place, pool: Pool) -> Iterator[PlaneCache]:
    """A cache in `layout`, released on leaving; afterwards it holds no tensors, even if somebody still holds it."""
    with layout.planes(spec, place) as planes:
        yield PlaneCache(spec, tier=layout.tier, device=place.device, planes=planes, pool=pool)
