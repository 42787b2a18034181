"""Interleaved blocks of a codec in host memory: 4 tokens' codes and scales of K and V in one run.

A few thousand tokens are appended and repeated through every layer: a gather reads only what it selects, and what is
repeated does not show in its time. A layer's copy begins at a block of its own and the repeated part is no power of two
of blocks long, so that a wrong layer or a wrong stride reads other numbers.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from realkernels.caches.host_memory import host_memory
from realkernels.codecs import Planes, codec_named
from realkernels.codecs.interleaved import block_layout, block_planes
from realkernels.shape import QsaShape

REPEATED_BLOCKS = 1021
"""Blocks that are appended and then repeated; a prime."""

NEWEST = 7
"""Tokens at the end that are appended one call each, straight into host memory."""


class InterleavedCache:
    """Blocks of a codec for `tokens` tokens in each of `slabs` (uint8, at least `layer_bytes`), one a layer.

    ValueError for a codec that is not kept in blocks, and for slabs that are too small.
    """

    def __init__(self, codec_name: str, slabs: Sequence[torch.Tensor], *, shape: QsaShape, tokens: int) -> None:
        self.codec_name, self.shape, self.tokens = codec_name, shape, tokens
        self.codec = codec_named(codec_name)
        self.blocks, self.block_bytes = -(-tokens // shape.ratio), _block_bytes(codec_name, shape)
        self.token_bytes = self.codec.token_bytes(shape.kv_heads, shape.head_dim)
        size = self.blocks * self.block_bytes
        for slab in slabs:
            if slab.dtype != torch.uint8 or slab.dim() != 1 or slab.nbytes < size:
                raise ValueError(f"{tokens} tokens of {codec_name} take {size} bytes, the slab is {list(slab.shape)}")
        self.device = slabs[0].device
        self.memory = [slab[:size].view(self.blocks, self.block_bytes) for slab in slabs]
        self.layers = [self._planes(memory) for memory in self.memory]

    def fill(self, seed: int = 0) -> None:
        """Standard normal rows in every block, those of the last block included; the newest tokens one by one."""
        source = torch.Generator(self.device).manual_seed(seed)
        blocks = min(self.blocks, REPEATED_BLOCKS)
        repeated = torch.zeros(blocks, self.block_bytes, dtype=torch.uint8, device=self.device)
        planes = self._planes(repeated)
        slots = torch.arange(planes.slots, device=self.device)
        self.codec.append(planes, slots, *self._rows(planes.slots, source), checked=False)
        first = max(0, self.tokens - NEWEST)
        newest = self._rows(self.tokens - first, source)
        for number, (memory, layer) in enumerate(zip(self.memory, self.layers, strict=True)):
            own = repeated.roll(number, 0)
            for part in memory.split(blocks):
                part.copy_(own[: part.shape[0]])
            for place in range(self.tokens - first):
                self.codec.append(layer, [first + place], *(rows[place : place + 1] for rows in newest))

    def _rows(self, tokens: int, source: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        size = (2, tokens, self.shape.kv_heads, self.shape.head_dim)
        keys, values = torch.randn(size, generator=source, device=self.device)
        return keys, values

    def _planes(self, memory: torch.Tensor) -> Planes:
        return block_planes(
            self.codec, blocks=memory.shape[0], block_tokens=self.shape.ratio, kv_heads=self.shape.kv_heads,
            head_dim=self.shape.head_dim, memory=memory,
        )  # fmt: skip

    def rows(self, layer: int, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of these tokens in the model's basis, float32."""
        return self.codec.restore(self.layers[layer], tokens, checked=False)

    def clear(self) -> None:
        """Forget every alias of the slabs, so that they can be given back although somebody still holds this object."""
        self.memory.clear()
        self.layers.clear()


def _block_bytes(codec_name: str, shape: QsaShape) -> int:
    size = {"block_tokens": shape.ratio, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
    return block_layout(codec_named(codec_name), **size).stride


def layer_bytes(codec_name: str, *, shape: QsaShape, tokens: int) -> int:
    """Bytes of one layer's blocks."""
    return -(-tokens // shape.ratio) * _block_bytes(codec_name, shape)


@contextmanager
def interleaved_cache(
    codec_name: str, *, shape: QsaShape, layers: int, tokens: int, device: torch.device, folder: str | None = None
) -> Iterator[InterleavedCache]:
    """A filled cache in host memory of its own: registered, or on the CPU in nameless files in `folder`.

    RegistrationError or RuntimeError in one line where there is no room; all of it is given back on leaving.
    """
    nbytes = layer_bytes(codec_name, shape=shape, tokens=tokens)
    with ExitStack() as memory:
        slabs = [memory.enter_context(host_memory(nbytes, device=device, folder=folder)).device for _ in range(layers)]
        cache = InterleavedCache(codec_name, slabs, shape=shape, tokens=tokens)
        slabs.clear()
        try:
            cache.fill()
            yield cache
        finally:
            cache.clear()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
                torch.cuda.empty_cache()
