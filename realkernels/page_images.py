"""Pages of a sequence as images in host memory: evicted, restored bit for bit, in whichever tier the planes lie.

An image holds the state of one page (256 tokens; fewer at the end of planes that are not whole pages) in all layers, so
that a cache of pages in RAM works alike for offloaded planes, which it copies from RAM to RAM, and for planes in VRAM.

Layout of an image, little-endian, without gaps; R rows, B = R // ratio blocks, E bytes an element:

    offset  bytes
    0       8   magic "QSAPAGE1"
    8       36  nine uint32: E's dtype code, layers, kv_heads, head_dim, index_dim, ratio, page number, R, B
    44      4   zero
    48      8   uint64: bytes of the whole image, this header of 64 included
    56      8   zero
    64      L   layer 0: K [R, kv_heads, head_dim], V likewise, raw keys [R, index_dim], pooled keys [B, index_dim]
    64 + L  L   layer 1, and so on; L = E (2 R kv_heads head_dim + (R + B) index_dim)
"""

import struct
from collections.abc import Iterator, Sequence

import torch

from realkernels.backend import QsaCache
from realkernels.layouts.layout import PLANES

PAGE_TOKENS = 256
HEADER_BYTES = 64
_MAGIC = b"QSAPAGE1"
_HEADER = struct.Struct("<8s10IQ8x")
_DTYPE_CODES = {torch.float16: 1, torch.bfloat16: 2, torch.float32: 3}
_FIELDS = ("dtype", "layers", "kv_heads", "head_dim", "index_dim", "ratio", "page", "rows", "blocks", "zero")


class ImageError(ValueError):
    """An image that does not belong here: another shape, dtype or page, or cut short. Nothing was written."""


def pages(tokens: int) -> int:
    """Pages that so many tokens take."""
    return -(-tokens // PAGE_TOKENS)


def image_bytes(cache: QsaCache, page: int) -> int:
    """Bytes of one page's image, header included."""
    _, planes = _planes(cache, page)
    return HEADER_BYTES + sum(plane.nbytes for plane in planes)


def evict_page(cache: QsaCache, page: int, image: torch.Tensor | None = None) -> torch.Tensor:
    """Copy a page into an image, uint8 [image_bytes] in host memory: into `image` if given, else into a new one.

    The planes stay as they are. Waits for the device. IndexError beyond the planes, ValueError for a wrong size.
    """
    header, planes = _planes(cache, page)
    size = HEADER_BYTES + sum(plane.nbytes for plane in planes)
    if image is None:
        image = torch.empty(size, dtype=torch.uint8)
    elif image.shape != (size,) or image.dtype != torch.uint8:
        raise ValueError(f"the image takes uint8 [{size}], not {image.dtype} {list(image.shape)}")
    _settle(cache)
    image[:HEADER_BYTES] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    for plane, part in _parts(planes, image):
        part.copy_(plane)
    return image


def restore_page(cache: QsaCache, page: int, image: torch.Tensor) -> None:
    """Copy an image back into the page that it was taken from, of these planes or of others of the same shape.

    Raises ImageError before anything is written. Waits for the device.
    """
    header, planes = _planes(cache, page)
    size = HEADER_BYTES + sum(plane.nbytes for plane in planes)
    _check(image, header, size)
    _settle(cache)
    for plane, part in _parts(planes, image):
        plane.copy_(part)


def evict(cache: QsaCache, end: int) -> list[torch.Tensor]:
    """Images of all pages of a context of `end` tokens."""
    return [evict_page(cache, page) for page in range(pages(end))]


def restore(cache: QsaCache, images: Sequence[torch.Tensor]) -> None:
    """Put the images of pages 0, 1, ... back; all of them are checked before the first is written."""
    for page, image in enumerate(images):
        header, planes = _planes(cache, page)
        _check(image, header, HEADER_BYTES + sum(plane.nbytes for plane in planes))
    for page, image in enumerate(images):
        restore_page(cache, page, image)


def _planes(cache: QsaCache, page: int) -> tuple[bytes, list[torch.Tensor]]:
    """The header of a page's image and the pieces of the planes in its order, host views where there are any."""
    shape = cache.shape
    if PAGE_TOKENS % shape.ratio:
        raise ValueError(f"blocks of {shape.ratio} tokens do not divide pages of {PAGE_TOKENS}")
    if not 0 <= page < pages(cache.tokens):
        raise IndexError(f"page {page} is out of range: the planes have pages 0 to {pages(cache.tokens) - 1}")
    first = page * PAGE_TOKENS
    rows = min(PAGE_TOKENS, cache.tokens - first)
    blocks = rows // shape.ratio
    cuts = {name: slice(first, first + rows) for name in PLANES}
    cuts["pooled_keys"] = slice(first // shape.ratio, first // shape.ratio + blocks)
    planes = [cache.plane(name, layer)[cuts[name]] for layer in range(cache.layers) for name in PLANES]
    size = HEADER_BYTES + sum(plane.nbytes for plane in planes)
    numbers = (cache.layers, shape.kv_heads, shape.head_dim, shape.index_dim, shape.ratio, page, rows, blocks, 0)
    return _HEADER.pack(_MAGIC, _DTYPE_CODES[cache.dtype], *numbers, size), planes


def _parts(planes: Sequence[torch.Tensor], image: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each piece of a plane with its place in the image, both as bytes: a NaN's payload must survive."""
    at = HEADER_BYTES
    for plane in planes:
        yield plane.view(torch.uint8).flatten(), image[at : at + plane.nbytes]
        at += plane.nbytes


def _check(image: torch.Tensor, header: bytes, size: int) -> None:
    if image.dtype != torch.uint8 or image.dim() != 1 or image.shape[0] < HEADER_BYTES:
        raise ImageError(f"not a page image: {image.dtype} {list(image.shape)}")
    magic, *found, nbytes = _HEADER.unpack(bytes(image[:HEADER_BYTES].tolist()))
    _, *wanted, _ = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise ImageError(f"not a page image: it begins with {magic!r}, not {_MAGIC!r}")
    for name, has, takes in zip(_FIELDS, found, wanted, strict=True):
        if has != takes:
            raise ImageError(f"the image has {name} {has}, these planes take {takes}")
    if nbytes != size or image.shape[0] != size:
        raise ImageError(f"the image is cut short or too long: {image.shape[0]} bytes, a page takes {size}")


def _settle(cache: QsaCache) -> None:
    """Kernels may still be writing or reading what the host is about to copy."""
    if cache.device.type == "cuda":
        torch.cuda.synchronize(cache.device)
