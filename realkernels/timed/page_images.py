"""Pages of a sequence copied to images in host memory and back, bit for bit, in either tier; both as timed calls.

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
from typing import NamedTuple

import torch

from realkernels.caches.qsa import PAGE_TOKENS, PLANES, QsaCache
from realkernels.timed.call import TimedCall

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
    return _page(cache, page).image_bytes


def evict_page(cache: QsaCache, page: int, image: torch.Tensor | None = None) -> torch.Tensor:
    """Copy a page into an image, uint8 [image_bytes] in host memory: into `image` if given, else into a new one.

    The planes stay as they are. Waits for the device. IndexError beyond the planes, ValueError for a wrong size.
    """
    source = _page(cache, page)
    size = source.image_bytes
    if image is None:
        image = torch.empty(size, dtype=torch.uint8)
    elif image.shape != (size,) or image.dtype != torch.uint8:
        raise ValueError(f"the image takes uint8 [{size}], not {image.dtype} {list(image.shape)}")
    _wait(cache)
    image[:HEADER_BYTES] = torch.frombuffer(bytearray(source.header), dtype=torch.uint8)
    for plane, part in source.parts(image):
        part.copy_(plane)
    return image


def evict(cache: QsaCache, end: int) -> list[torch.Tensor]:
    """Images of all pages of a context of `end` tokens."""
    return [evict_page(cache, page) for page in range(pages(end))]


def restore(cache: QsaCache, images: Sequence[torch.Tensor], *, first: int = 0) -> None:
    """Copy images back into the pages `first`, `first` + 1, ... that they were taken from.

    Of these planes or of others of the same shape. Raises ImageError before anything is written. Waits for the device.
    """
    targets = [_page(cache, first + number) for number in range(len(images))]
    for target, image in zip(targets, images, strict=True):
        target.check(image)
    _wait(cache)
    for target, image in zip(targets, images, strict=True):
        for plane, part in target.parts(image):
            plane.copy_(part)


class _Page(NamedTuple):
    """A page of a cache: its image's header, and its parts of the planes in the order of the image."""

    header: bytes
    planes: list[torch.Tensor]

    @property
    def image_bytes(self) -> int:
        return HEADER_BYTES + sum(plane.nbytes for plane in self.planes)

    def parts(self, image: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each part of a plane with its place in the image, both as bytes: a NaN's payload must survive."""
        at = HEADER_BYTES
        for plane in self.planes:
            yield plane.view(torch.uint8).flatten(), image[at : at + plane.nbytes]
            at += plane.nbytes

    def check(self, image: torch.Tensor) -> None:
        """ImageError unless the image is one of this page."""
        if image.dtype != torch.uint8 or image.dim() != 1 or image.shape[0] < HEADER_BYTES:
            raise ImageError(f"not a page image: {image.dtype} {list(image.shape)}")
        magic, *found, nbytes = _HEADER.unpack(bytes(image[:HEADER_BYTES].tolist()))
        _, *wanted, size = _HEADER.unpack(self.header)
        if magic != _MAGIC:
            raise ImageError(f"not a page image: it begins with {magic!r}, not {_MAGIC!r}")
        for name, has, takes in zip(_FIELDS, found, wanted, strict=True):
            if has != takes:
                raise ImageError(f"the image has {name} {has}, these planes take {takes}")
        if nbytes != size or image.shape[0] != size:
            raise ImageError(f"the image is cut short or too long: {image.shape[0]} bytes, a page takes {size}")


def _page(cache: QsaCache, page: int) -> _Page:
    shape = cache.shape
    if PAGE_TOKENS % shape.ratio:
        raise ValueError(f"blocks of {shape.ratio} tokens do not divide pages of {PAGE_TOKENS}")
    if not 0 <= page < pages(cache.tokens):
        raise IndexError(f"page {page} is out of range: the planes have pages 0 to {pages(cache.tokens) - 1}")
    first = page * PAGE_TOKENS
    rows = min(PAGE_TOKENS, cache.tokens - first)
    blocks = rows // shape.ratio
    own = {name: slice(first, first + rows) for name in PLANES}
    own["pooled_keys"] = slice(first // shape.ratio, first // shape.ratio + blocks)
    planes = [cache.plane(name, layer)[own[name]] for layer in range(cache.layers) for name in PLANES]
    size = HEADER_BYTES + sum(plane.nbytes for plane in planes)
    numbers = (cache.layers, shape.kv_heads, shape.head_dim, shape.index_dim, shape.ratio, page, rows, blocks, 0)
    return _Page(_HEADER.pack(_MAGIC, _DTYPE_CODES[cache.dtype], *numbers, size), planes)


def _wait(cache: QsaCache) -> None:
    """Kernels may still be writing or reading what the host is about to copy."""
    if cache.device.type == "cuda":
        torch.cuda.synchronize(cache.device)


class _Images(TimedCall):
    """Copies of the first `pages` pages of a cache, a call each. Its planes in VRAM cross the link."""

    capturable = False

    def __init__(self, cache: QsaCache, *, pages: int) -> None:
        self.cache, self.calls = cache, pages
        self.images = evict(cache, pages * PAGE_TOKENS)
        self.moved_bytes = sum(image.nbytes for image in self.images) / pages
        on_host = sum(cache.layer_bytes(name) for name in cache.offloaded) * cache.layers
        share = 1 - on_host / sum(cache.bytes_by_tier().values())
        self.link_bytes = share * self.moved_bytes if cache.device.type == "cuda" else 0.0

    def error(self) -> float:
        """0 where planes and images hold the same bytes, infinite otherwise."""
        kept = [_page(self.cache, number).parts(image) for number, image in enumerate(self.images)]
        same = all(torch.equal(plane.cpu(), part) for parts in kept for plane, part in parts)
        return 0.0 if same and self.finite() else float("inf")


class EvictPages(_Images):
    """Pages copied to images that are there already."""

    def run(self) -> None:
        """Every page."""
        for page, image in enumerate(self.images):
            evict_page(self.cache, page, image)

    def poison(self) -> None:
        """Fresh planes, images without a header."""
        self.cache.fill_random(int(torch.randint(2**31, ())))
        for image in self.images:
            image.zero_()

    def finite(self) -> bool:
        """Whether every image has a header."""
        return all(bool(image[0]) for image in self.images)


class RestorePages(_Images):
    """Images copied back to the pages that they were taken from."""

    def run(self) -> None:
        """Every page, checked first."""
        restore(self.cache, self.images)

    def poison(self) -> None:
        """Other rows in the images, NaN in the planes."""
        self.cache.fill_random(int(torch.randint(2**31, ())))
        for page, image in enumerate(self.images):
            evict_page(self.cache, page, image)
        for planes in self.cache.planes.values():
            for plane in planes:
                plane.fill_(float("nan"))

    def finite(self) -> bool:
        """Whether every page has been written."""
        rows = min(self.calls * PAGE_TOKENS, self.cache.tokens)
        return all(bool(plane[:rows].isfinite().all()) for plane in (*self.cache.keys, *self.cache.raw_keys))
