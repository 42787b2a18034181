"""Sparse decode attention over a format's records in host memory, as it is timed and checked, on a GPU or on the CPU.

A few thousand tokens are appended and repeated through every layer's slab: a gather reads only what it selects, and
what is repeated does not show in its time. A layer's copy begins at a block of its own and the piece is no power of two
of blocks long, so that a wrong layer or a wrong stride reads other numbers.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch

from realkernels import reference
from realkernels.bounds import check_selected
from realkernels.codecs import Planes
from realkernels.codecs import codec_named as format_named
from realkernels.codecs.interleaved import block_layout as record_of
from realkernels.codecs.interleaved import block_planes
from realkernels.file_slab import file_slab
from realkernels.host_slab import HostSlab, host_slab
from realkernels.library import relative_error
from realkernels.records_cpu import attend_records
from realkernels.shape import QsaShape

HALF = torch.float16
PIECE_BLOCKS = 1021
"""Blocks that are appended and then repeated; a prime."""

NEWEST = 7
"""Tokens at the end that are appended one call each, straight into host memory."""


class RecordCache:
    """Records of a format for `tokens` tokens in each of `slabs` (uint8, at least `slab_bytes`), one a layer.

    ValueError for a format that is not kept in records, and for slabs that are too small.
    """

    def __init__(self, name: str, slabs: Sequence[torch.Tensor], *, shape: QsaShape, tokens: int) -> None:
        self.name, self.shape, self.tokens = name, shape, tokens
        self.format = format_named(name)
        self.blocks, self.record_bytes = -(-tokens // shape.ratio), _record_bytes(name, shape)
        self.token_bytes = self.format.token_bytes(shape.kv_heads, shape.head_dim)
        size = self.blocks * self.record_bytes
        for slab in slabs:
            if slab.dtype != torch.uint8 or slab.dim() != 1 or slab.nbytes < size:
                raise ValueError(f"{tokens} tokens of {name} take {size} bytes, the slab is {list(slab.shape)}")
        self.device = slabs[0].device
        self.memory = [slab[:size].view(self.blocks, self.record_bytes) for slab in slabs]
        self.layers = [self._planes(memory) for memory in self.memory]

    def fill(self, seed: int = 0) -> None:
        """Standard normal rows in every block, those of the last block included; the newest tokens one by one."""
        source = torch.Generator(self.device).manual_seed(seed)
        blocks = min(self.blocks, PIECE_BLOCKS)
        piece = torch.zeros(blocks, self.record_bytes, dtype=torch.uint8, device=self.device)
        planes = self._planes(piece)
        slots = torch.arange(planes.slots, device=self.device)
        self.format.append(planes, slots, *self._rows(planes.slots, source), checked=False)
        first = max(0, self.tokens - NEWEST)
        newest = self._rows(self.tokens - first, source)
        for number, (memory, layer) in enumerate(zip(self.memory, self.layers, strict=True)):
            own = piece.roll(number, 0)
            for part in memory.split(blocks):
                part.copy_(own[: part.shape[0]])
            for place in range(self.tokens - first):
                self.format.append(layer, [first + place], *(rows[place : place + 1] for rows in newest))

    def _rows(self, tokens: int, source: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        size = (2, tokens, self.shape.kv_heads, self.shape.head_dim)
        keys, values = torch.randn(size, generator=source, device=self.device)
        return keys, values

    def _planes(self, memory: torch.Tensor) -> Planes:
        return block_planes(
            self.format, blocks=memory.shape[0], block_tokens=self.shape.ratio, kv_heads=self.shape.kv_heads,
            head_dim=self.shape.head_dim, memory=memory,
        )  # fmt: skip

    def rows(self, layer: int, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of these tokens in the model's basis, float32."""
        return self.format.restore(self.layers[layer], tokens, checked=False)

    def clear(self) -> None:
        """Forget every alias of the slabs, so that they can be given back although somebody still holds this object."""
        self.memory.clear()
        self.layers.clear()


def _record_bytes(name: str, shape: QsaShape) -> int:
    size = {"block_tokens": shape.ratio, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
    return record_of(format_named(name), **size).stride


def slab_bytes(name: str, *, shape: QsaShape, tokens: int) -> int:
    """Bytes of one layer's records."""
    return -(-tokens // shape.ratio) * _record_bytes(name, shape)


def _slab(nbytes: int, device: torch.device, folder: str | None) -> AbstractContextManager[HostSlab]:
    return host_slab(nbytes, device=device) if device.type == "cuda" else file_slab(nbytes, folder=folder)


@contextmanager
def record_cache(
    name: str, *, shape: QsaShape, layers: int, tokens: int, device: torch.device, folder: str | None = None
) -> Iterator[RecordCache]:
    """A filled cache in slabs of its own: registered host memory, on the CPU nameless files in `folder`.

    RegistrationError or RuntimeError in one line where there is no room; all of it is given back on leaving.
    """
    nbytes = slab_bytes(name, shape=shape, tokens=tokens)
    with ExitStack() as stack:
        slabs = [stack.enter_context(_slab(nbytes, device, folder)).device for _ in range(layers)]
        cache = RecordCache(name, slabs, shape=shape, tokens=tokens)
        slabs.clear()
        try:
            cache.fill()
            yield cache
        finally:
            cache.clear()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
                torch.cuda.empty_cache()


class HostGather:
    """Attention of the token at position `end` - 1 over a fresh selection in every layer of a cache, one after another.

    ValueError for a context beyond the cache, and for one with fewer complete blocks than are selected.
    """

    def __init__(self, cache: RecordCache, *, end: int) -> None:
        shape, device = cache.shape, cache.device
        if end > cache.tokens or shape.blocks(end) < shape.topk:
            raise ValueError(f"a context of {end} tokens: {shape.budget} to {cache.tokens} can be gathered here")
        self.cache, self.shape, self.end = cache, shape, end
        size = (len(cache.layers), shape.query_heads, shape.head_dim)
        self.query = torch.empty(size, dtype=HALF, device=device)
        self.output = torch.empty_like(self.query)
        self.selected = torch.empty(size[0], shape.topk, dtype=torch.int32, device=device)
        self._attend = self._kernels() if device.type == "cuda" else self._in_torch
        self.poison()

    @property
    def link_bytes(self) -> int:
        """Bytes of records that one layer reads."""
        return (self.shape.budget + self.end % self.shape.ratio) * self.cache.token_bytes

    def _kernels(self) -> Callable[[int], None]:
        from realkernels.gather import GatherBuffers, GatherPlan  # noqa: PLC0415 - needs triton
        from realkernels.gather_records import Reading, gather_records  # noqa: PLC0415

        cache, shape, plan = self.cache, self.shape, GatherPlan()
        reading = Reading.of(cache.format, shape, device=cache.device)
        buffers = GatherBuffers.allocate(shape, plan, cache.device)

        def attend(layer: int) -> None:
            gather_records(
                self.query[layer], cache.layers[layer], self.selected[layer], self.end, self.output[layer], buffers,
                shape, plan, reading, checked=False,
            )  # fmt: skip

        return attend

    def _in_torch(self, layer: int) -> None:
        attend_records(
            self.query[layer], self.cache.layers[layer], self.selected[layer], self.end, self.output[layer],
            self.cache.format, self.shape,
        )  # fmt: skip

    def run(self) -> None:
        """Every layer, rotations of queries and outputs included."""
        for layer in range(len(self.cache.layers)):
            self._attend(layer)

    def poison(self, _index: int = 0) -> None:
        """NaN in the output, fresh queries, any blocks in any order."""
        self.query.normal_()
        for row in self.selected:
            row.copy_(torch.randperm(self.shape.blocks(self.end), device=row.device)[: self.shape.topk])
        self.output.fill_(float("nan"))

    def finite(self) -> bool:
        """Whether the output has been written."""
        return bool(self.output.isfinite().all())

    def verify(self) -> float:
        """Run on a fresh selection; worst relative error of a layer against float64."""
        self.poison()
        self.run()
        return self.error()

    def error(self) -> float:
        """Of the output as it is, against float64 attention over the unpacked selection; infinite where not finite.

        IndexError where `selected` holds an index that is out of range, or one twice.
        """
        check_selected(self.selected, blocks=self.shape.blocks(self.end))
        if not self.finite():
            return float("inf")
        worst = 0.0
        for layer in range(len(self.cache.layers)):
            tokens = reference.selected_tokens(self.selected[layer].long(), self.end, self.shape.ratio)
            truth = reference.attend(self.query[layer], *self.cache.rows(layer, tokens))
            worst = max(worst, relative_error(self.output[layer], truth))
        return worst
