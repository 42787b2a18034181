"""The planes of one sparsely attended sequence, in device memory or offloaded, and the two ways to write them.

`vram`: every plane in the device's own memory, ordinary memory where the CPU is the device. `host` (the layout
`offload`): K, V and raw keys in host memory that the device reads in place, pooled keys on the device.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from math import prod
from typing import Literal

import torch

from realkernels.caches.host_memory import host_memory
from realkernels.device import vram_for
from realkernels.jit import tl, triton
from realkernels.shape import QsaShape

Tier = Literal["vram", "host"]
PlaneName = Literal["keys", "values", "raw_keys", "pooled_keys"]

TIERS: dict[str, Tier] = {"vram": "vram", "offload": "host"}
"""By layout, as the command line calls it: where K, V and raw keys lie; pooled keys always lie on the device."""

PLANES: tuple[PlaneName, ...] = ("keys", "values", "raw_keys", "pooled_keys")
OFFLOADED: tuple[PlaneName, ...] = ("keys", "values", "raw_keys")
"""In the order in which they lie in a layer's host memory, without gaps."""

DTYPE = torch.float16
"""Of all planes, where nothing else is asked for."""

PAGE_TOKENS = 256
"""Staging and page images copy whole pages of a cache, as the published engine does (exllamav3 `constants.py`)."""

FILL_ROWS = 65536
"""Rows filled at once, so that filling needs no second plane."""


class QsaCache:
    """Planes of `layers` layers for one sequence of up to `tokens` tokens; contents are undefined until written.

    ValueError for sizes that cannot be.
    """

    def __init__(
        self, shape: QsaShape, *, layers: int, tokens: int, tier: Tier, device: torch.device, dtype: torch.dtype,
        triton: bool,
    ) -> None:  # fmt: skip
        if layers < 1:
            raise ValueError(f"layers is {layers}, which is below 1")
        if tokens < shape.ratio:
            raise ValueError(f"tokens is {tokens}, below one block of {shape.ratio}")
        if tier not in TIERS.values():
            raise ValueError(f"no tier {tier!r}; there are {', '.join(sorted(TIERS.values()))}")
        for name in ("head_dim", "index_dim") if triton else ():
            width = getattr(shape, name)
            if width < 16 or width & (width - 1):
                raise ValueError(f"{name} is {width}: these kernels take powers of two from 16 on")
        self.shape, self.layers, self.tokens, self.dtype, self.tier = shape, layers, tokens, dtype, tier
        self.device = device
        """Where pooled keys lie and kernels run."""
        self.triton = triton
        """Whether Triton kernels run over it, or plain torch."""
        self.planes: dict[PlaneName, list[torch.Tensor]] = {name: [] for name in PLANES}
        """One tensor a layer, as the device addresses it."""
        self.keys, self.values = self.planes["keys"], self.planes["values"]
        """[tokens, kv_heads, head_dim] a layer."""
        self.raw_keys, self.pooled_keys = self.planes["raw_keys"], self.planes["pooled_keys"]
        """[tokens, index_dim] and [tokens // ratio, index_dim] a layer."""
        self._host: dict[PlaneName, list[torch.Tensor]] = {name: [] for name in self.offloaded}

    @property
    def offloaded(self) -> tuple[PlaneName, ...]:
        """Planes that lie in host memory."""
        return OFFLOADED if self.tier == "host" else ()

    def plane(self, name: PlaneName, layer: int) -> torch.Tensor:
        """A plane as copies want it: as a tensor of the host where it lies there, of the device otherwise."""
        return self._host.get(name, self.planes[name])[layer]

    def size(self, name: PlaneName) -> tuple[int, ...]:
        """Shape of one layer's plane."""
        if name == "raw_keys":
            return (self.tokens, self.shape.index_dim)
        if name == "pooled_keys":
            return (self.shape.blocks(self.tokens), self.shape.index_dim)
        return (self.tokens, self.shape.kv_heads, self.shape.head_dim)

    def layer_bytes(self, *names: PlaneName) -> int:
        """Bytes of these planes in one layer, by arithmetic."""
        return sum(prod(self.size(name)) for name in names) * self.dtype.itemsize

    def bytes_by_tier(self) -> dict[Tier, int]:
        """Bytes of the tensors themselves, for both tiers."""
        total: dict[Tier, int] = {"vram": 0, "host": 0}
        for name, tensors in self.planes.items():
            total["host" if name in self.offloaded else "vram"] += sum(tensor.nbytes for tensor in tensors)
        return total

    def fill_random(self, seed: int) -> None:
        """Standard normal values in K, V and raw keys; pooled keys are pooled from the raw ones."""
        for layer in range(self.layers):
            for index, planes in enumerate((self.keys, self.values, self.raw_keys)):
                plane = planes[layer]
                source = torch.Generator(plane.device).manual_seed((seed * 1009 + layer) * 3 + index)
                draw = torch.float32 if plane.device.type == "cpu" else plane.dtype
                for part in plane.split(FILL_ROWS):
                    part.copy_(torch.randn(part.shape, dtype=draw, device=plane.device, generator=source))
            self._pool(layer, range(self.shape.blocks(self.tokens)))

    def append(self, layer: int, past: int, keys: torch.Tensor, values: torch.Tensor, raw_keys: torch.Tensor) -> None:
        """Write rows at `past` and rebuild the pooled keys of every block that they touch and complete.

        keys and values [rows, kv_heads, head_dim], raw_keys [rows, index_dim], rows >= 1, in the planes' dtype.
        ValueError for other shapes or dtypes and for rows beyond the planes; nothing is written then.
        """
        rows = keys.shape[0]
        if past < 0 or rows < 1 or past + rows > self.tokens:
            raise ValueError(f"rows {past} to {past + rows - 1} do not lie in planes of {self.tokens} tokens")
        written = [(self.keys[layer], keys), (self.values[layer], values), (self.raw_keys[layer], raw_keys)]
        for plane, new in written:
            expected = (rows, *plane.shape[1:])
            if tuple(new.shape) != expected or new.dtype != plane.dtype:
                raise ValueError(f"rows are {new.dtype} {tuple(new.shape)}, the plane takes {plane.dtype} {expected}")
        for plane, new in written:
            plane[past : past + rows].copy_(new)
        self._pool(layer, touched_blocks(past, rows, self.shape.ratio))

    def _pool(self, layer: int, blocks: range) -> None:
        pool = pool_blocks_on_device if self.triton else pool_blocks
        pool(self.raw_keys[layer], self.pooled_keys[layer], blocks, self.shape.ratio)

    def allocate_layer(self, memory: ExitStack, *, huge_pages: bool, folder: str | None) -> None:
        """Add the planes of one layer; `memory` gives its host memory back."""
        for name in PLANES:
            if name not in self.offloaded:
                self.planes[name].append(torch.empty(self.size(name), dtype=self.dtype, device=self.device))
        if self.offloaded:
            nbytes = self.layer_bytes(*self.offloaded)
            held = host_memory(nbytes, device=self.device, huge_pages=huge_pages, folder=folder)
            slab = memory.enter_context(held)
            self._carve(self.planes, slab.device)
            self._carve(self._host, slab.host)

    def _carve(self, into: dict[PlaneName, list[torch.Tensor]], slab: torch.Tensor) -> None:
        at = 0
        for name in OFFLOADED:
            count = self.layer_bytes(name)
            into[name].append(slab[at : at + count].view(self.dtype).view(self.size(name)))
            at += count

    def clear(self) -> None:
        """Forget every tensor, so that memory can be given back although somebody still holds this cache."""
        for tensors in (*self.planes.values(), *self._host.values()):
            tensors.clear()


@contextmanager
def qsa_cache(
    shape: QsaShape, *, layers: int, tokens: int, tier: Tier, device: torch.device, dtype: torch.dtype = DTYPE,
    huge_pages: bool = True, folder: str | None = None, triton: bool | None = None,
) -> Iterator[QsaCache]:  # fmt: skip
    """A cache whose memory is given back on leaving, on every path; afterwards it holds no tensors.

    RuntimeError in one line where a memory is too small, with what is needed and what is free, and nothing is left
    allocated or pinned. `huge_pages`: of registered host memory; `folder`: where the CPU keeps the files of its offload
    tier; `triton`: for tests, that kernels are interpreted.
    """
    cache = QsaCache(
        shape, layers=layers, tokens=tokens, tier=tier, device=device, dtype=dtype,
        triton=device.type == "cuda" if triton is None else triton,
    )  # fmt: skip
    needed = layers * cache.layer_bytes(*(name for name in PLANES if name not in cache.offloaded))
    with ExitStack() as memory:
        try:
            with vram_for(f"a cache of {tokens} tokens", needed, device):
                for _ in range(layers):
                    cache.allocate_layer(memory, huge_pages=huge_pages, folder=folder)
            yield cache
        finally:
            cache.clear()
            if device.type == "cuda":
                torch.cuda.empty_cache()


# Pooled keys follow the rows: whoever writes rows rebuilds the blocks that they touch and complete, no others. A pooled
# key is the mean of its block's raw keys, summed in float32 in the order of the tokens and rounded once to the planes'
# dtype (exllamav3 `modules/qsa_indexer.py`; its norm and rope belong to the model).


def touched_blocks(past: int, rows: int, ratio: int) -> range:
    """Blocks that `rows` rows written at `past` touch and that are complete with them."""
    return range(past // ratio, (past + rows) // ratio)


def pool_blocks(raw_keys: torch.Tensor, pooled_keys: torch.Tensor, blocks: range, ratio: int) -> None:
    """Rebuild these rows of pooled_keys [blocks, index_dim] from raw_keys [tokens, index_dim], with plain torch.

    NaN and infinity stay in their own block, and selection gives a block with such a key its worst or best score.
    """
    if not blocks:
        return
    part = raw_keys[blocks.start * ratio : blocks.stop * ratio].view(len(blocks), ratio, -1)
    total = part[:, 0].float()
    for index in range(1, ratio):
        total = total + part[:, index].float()
    pooled_keys[blocks.start : blocks.stop] = (total * (1.0 / ratio)).to(pooled_keys.dtype)


@triton.jit
def _pool(
    raw_keys, pooled_keys, first, stop, scale,
    RATIO: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    block = first + tl.program_id(0) * TILE + tl.arange(0, TILE)
    dims = tl.arange(0, DIM_PAD)
    live = (block < stop)[:, None] & (dims < DIM)[None, :]
    total = tl.zeros([TILE, DIM_PAD], dtype=tl.float32)
    for index in tl.static_range(RATIO):  # in the order of the tokens, as the torch path does
        token = block.to(tl.int64) * RATIO + index
        total += tl.load(raw_keys + token[:, None] * DIM + dims[None, :], mask=live, other=0.0).to(tl.float32)
    mean = (total * scale).to(pooled_keys.dtype.element_ty)
    tl.store(pooled_keys + block.to(tl.int64)[:, None] * DIM + dims[None, :], mean, mask=live)


def pool_blocks_on_device(raw_keys: torch.Tensor, pooled_keys: torch.Tensor, blocks: range, ratio: int) -> None:
    """What `pool_blocks` does, bit for bit, in one launch; raw keys may lie in mapped host memory."""
    if not blocks:
        return
    tile, dim = 16, raw_keys.shape[1]
    _pool[(triton.cdiv(len(blocks), tile),)](
        raw_keys, pooled_keys, blocks.start, blocks.stop, 1.0 / ratio,
        RATIO=ratio, DIM=dim, DIM_PAD=triton.next_power_of_2(dim), TILE=tile, num_warps=4,
    )  # fmt: skip
