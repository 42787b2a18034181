"""Interleaved blocks: codes and scales of K and V of a block of tokens in one run, which a sparse gather reads at once.

| bytes of a block, in this order | content |
|---|---|
| H x B x C | K codes [head, token, codes] |
| H x B x C | V codes |
| H x 2 x B x S | scales [head, K then V, token, scales] |
| up to a multiple of 64 | nothing: zeros, never read |

B tokens a block, H KV heads, C and S bytes of codes and scales of a token and head, as the codec has them. At 4 tokens
and 2 heads of 256 no codec needs padding: int4_per_token_head 1,024 + 1,024 + 64 = 2,112 B, int8_per_token_head 4,160
B, q4_0 and exl3_k4v4 2,304 B, q8_0 4,352 B. A codec's own append and dequantise work on such planes as they are: a
page is a block, slot = token.

A device asks for host memory in pieces of 32 B, up to 128 B of one line at once. So codes come first, where no scale
moves them off a line, and what a head needs of scales is one run: for int4_per_token_head 10 requests a block and head
on average, where scales after the codes of each plane would make it 11.5.
"""

from math import prod

import torch

from realkernels.codecs.codec import Codec, Part, PartLayout, Planes, RowCodec, check_sizes, cut

BLOCK_ALIGNMENT = 64
"""Bytes that blocks begin on: two of the 32 B pieces in which a device asks for host memory."""

BLOCK_CODECS = ("int8_per_token_head", "int4_per_token_head", "q8_0", "q4_0", "exl3_k4v4")
"""Codecs that a gather kernel reads in interleaved blocks."""

CODES = ("key_data", "value_data")
SCALES = ("key_scale", "value_scale")


def block_layout(codec: Codec, *, block_tokens: int, kv_heads: int, head_dim: int) -> PartLayout:
    """Of one block; ValueError for a codec that is not kept so, and for sizes that do not fit it."""
    check_sizes(block_tokens=block_tokens, kv_heads=kv_heads, head_dim=head_dim)
    if codec.name not in BLOCK_CODECS or not isinstance(codec, RowCodec):
        raise ValueError(f"{codec.name} is not kept in blocks: there are {', '.join(BLOCK_CODECS)}")
    found = {part.name: (layout, part) for layout in codec.layouts(head_dim) for part in layout.parts}
    parts = []
    for name in CODES:
        layout, part = found[name]
        parts.append(Part(name, part.dtype, (kv_heads, block_tokens, *layout.inner, *part.shape)))
    layout, part = found["key_scale"]
    parts.append(Part("scales", part.dtype, (kv_heads, len(SCALES), block_tokens, *layout.inner, *part.shape)))
    return PartLayout("blocks", tuple(parts), pad_to=BLOCK_ALIGNMENT)


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
    parts |= dict(zip(SCALES, parts.pop("scales").unbind(2), strict=True))
    codec.warm(head_dim, memory.device)
    return Planes(
        pages=blocks,
        page_tokens=block_tokens,
        kv_heads=kv_heads,
        head_dim=head_dim,
        tensors={"blocks": memory},
        parts=parts,
    )  # fmt: skip


def row_shape(layout: PartLayout, name: str) -> tuple[int, ...]:
    """Elements of one token and head of `key_data`, `value_data`, `key_scale` or `value_scale`."""
    part, skipped = _part_of(layout, name)
    return part.shape[skipped:]


def row_bytes(layout: PartLayout, name: str) -> int:
    """Their bytes."""
    part, skipped = _part_of(layout, name)
    return int(part.dtype.itemsize) * prod(part.shape[skipped:])


def _part_of(layout: PartLayout, name: str) -> tuple[Part, int]:
    """The part that holds it, and how many of its axes come before a row's."""
    held = "scales" if name in SCALES else name
    part = next(part for part in layout.parts if part.name == held)
    return part, 3 if name in SCALES else 2
