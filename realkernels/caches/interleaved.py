"""Interleaved blocks: codes and scales of K and V of a block of tokens in one run, which a sparse gather reads at once.

| bytes of a block, in this order | content |
|---|---|
| H x B x C | K codes [head, token, codes] |
| H x B x C | V codes |
| H x 2 x B x S | scales, minima and fifth bits [head, K then V, token, group], ordered as published |
| up to a multiple of 64 | nothing: zeros, never read |

B tokens a block, H KV heads, C and S bytes of codes and of what else a token and head has, as the codec has them. At 4
tokens and 2 heads of 256 no codec needs padding: int4_per_token_head 1,024 + 1,024 + 64 = 2,112 B, int8_per_token_head
4,160 B, groups of 4 bits with a scale 2,304 B, q8_0 4,352 B. A codec's own append and dequantise work on
such planes as they are: a page is a block, slot = token.

A device asks for host memory in pieces of 32 B, up to 128 B of one line at once. So codes come first, where no scale
moves them off a line, and what a head needs of scales is one run: for int4_per_token_head 10 requests a block and head
on average, where scales after the codes of each plane would make it 11.5.

Of a cache a few thousand tokens are appended and repeated through every layer: a gather reads only what it selects, and
what is repeated does not show in its time. A layer's copy begins at a block of its own and the repeated part is no
power of two of blocks long, so that a wrong layer or a wrong stride reads other numbers.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from math import prod

import torch

from realkernels.caches.host_memory import host_memory
from realkernels.codecs import PLANES, Codec, Plane, Planes, RowCodec, codec_named, codec_names
from realkernels.codecs.codec import Part, PartLayout, check_sizes, cut
from realkernels.shape import QsaShape

BLOCK_ALIGNMENT = 64
"""Bytes that blocks begin on: two of the 32 B pieces in which a device asks for host memory."""

CODES = ("key_data", "value_data")

BLOCK_CODECS = tuple(name for name in codec_names() if getattr(codec_named(name), "interleaved", None) is not None)
"""Codecs that a gather kernel reads in interleaved blocks."""


def block_layout(codec: Codec, *, block_tokens: int, kv_heads: int, head_dim: int) -> PartLayout:
    """Of one block; ValueError for a codec that is not kept so, and for sizes that do not fit it."""
    check_sizes(block_tokens=block_tokens, kv_heads=kv_heads, head_dim=head_dim)
    if codec.name not in BLOCK_CODECS or not isinstance(codec, RowCodec):
        raise ValueError(f"{codec.name} is not kept in blocks: there are {', '.join(BLOCK_CODECS)}")
    parts = []
    for name in CODES:
        layout, part = _found(codec, head_dim)[name]
        parts.append(Part(name, part.dtype, (kv_heads, block_tokens, *layout.inner, *part.shape)))
    size = sum(part.nbytes for part in _scale_parts(codec, "key", head_dim))
    groups = _found(codec, head_dim)["key_scale"][0].inner
    parts.append(Part("scales", torch.uint8, (kv_heads, len(PLANES), block_tokens, *groups, size)))
    return PartLayout("blocks", tuple(parts), pad_to=BLOCK_ALIGNMENT)


def _found(codec: RowCodec, head_dim: int) -> dict[str, tuple[PartLayout, Part]]:
    """Every part of the codec with the layout that holds it, in the order of the published ones."""
    return {part.name: (layout, part) for layout in codec.layouts(head_dim) for part in layout.parts}


def _scale_parts(codec: RowCodec, plane: Plane, head_dim: int) -> tuple[Part, ...]:
    """What a token and head, or each of its groups, has beside its codes."""
    found = _found(codec, head_dim)
    return tuple(part for name, (_, part) in found.items() if name.startswith(plane) and name not in CODES)


def block_planes(
    codec: Codec, *, blocks: int, block_tokens: int, kv_heads: int, head_dim: int, memory: torch.Tensor
) -> Planes:  # fmt: skip
    """Planes over `memory`, uint8 [blocks, block bytes] anywhere, as it is; ValueError for other sizes."""
    layout = block_layout(codec, block_tokens=block_tokens, kv_heads=kv_heads, head_dim=head_dim)
    if memory.dtype != torch.uint8 or tuple(memory.shape) != (blocks, layout.stride):
        raise ValueError(
            f"memory is {memory.dtype} {tuple(memory.shape)}: {blocks} interleaved blocks of {codec.name} are uint8 "
            f"[{blocks}, {layout.stride}]"
        )
    parts = cut(memory, layout.parts)
    for plane, scales in zip(PLANES, parts.pop("scales").unbind(2), strict=True):
        parts |= cut(scales, _scale_parts(codec, plane, head_dim))
    codec.warm(head_dim, memory.device)
    return Planes(
        pages=blocks, page_tokens=block_tokens, kv_heads=kv_heads, head_dim=head_dim, tensors={"blocks": memory},
        parts=parts,
    )  # fmt: skip


def code_bytes(layout: PartLayout) -> int:
    """Bytes of a token and head's codes of K, or of V."""
    return layout.parts[0].nbytes // prod(layout.parts[0].shape[:2])


def scales_shape(layout: PartLayout) -> tuple[int, int]:
    """Groups of a head that have scales of their own, and the bytes of what one has beside its codes."""
    shape = layout.parts[-1].shape
    return prod(shape[3:-1]), shape[-1]


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
